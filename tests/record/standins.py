"""What the probe tests put in the place of SGLang: plain classes that refuse what was not foreseen.

A `Tensor` here has a shape and nothing else. Asking for a value, comparing or copying raises, so a
probe that would wait for a device fails its test.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from padtrace.record.hooks import Hook, around
from padtrace.record.probes.context import Context
from padtrace.record.ring import EventWriter
from padtrace.record.seal import seal
from padtrace.record.state import State
from padtrace.recording.model import Event, Recording


class Tensor:
    """Rows and columns on a device."""

    __slots__ = ("dtype", "shape")

    def __init__(self, *shape: int, dtype: str = "torch.int64") -> None:
        self.shape = shape
        self.dtype = dtype

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError("a probe asked for the value of a device tensor")

    __bool__ = __int__ = __index__ = __float__ = __len__ = __iter__ = __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]
    item = tolist = cpu = max = sum = numel = clone = _refuse


class HostTensor:
    """seq_lens_cpu: a tensor on the host, whose values may be read."""

    is_cpu = True

    def __init__(self, values: list[int]) -> None:
        self._values = values
        self.shape = (len(values),)

    def tolist(self) -> list[int]:
        return list(self._values)


class Mode(enum.IntEnum):
    """ForwardMode, as far as the tests go."""

    EXTEND = 1
    DECODE = 2
    IDLE = 4


class PaddingMode(enum.IntEnum):
    """DpPaddingMode; an int enum of its own, equal to modes by number."""

    MAX_LEN = 1
    SUM_LEN = 2


@dataclass(eq=False)
class ForwardBatch:
    """The fields of ForwardBatch that the tests need; the others are absent in "this release"."""

    forward_mode: Mode
    batch_size: int
    input_ids: Tensor | None = None
    positions: Tensor | None = None
    seq_lens: Tensor | None = None
    seq_lens_cpu: HostTensor | None = None
    seq_lens_sum: int | None = None
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    lora_ids: list[str | None] | None = None
    global_num_tokens_cpu: list[int] | None = None
    original_global_num_tokens_cpu: list[int] | None = None
    global_num_tokens_for_logprob_cpu: list[int] | None = None
    dp_padding_mode: PaddingMode | None = None
    forward_metadata_ready: bool = False
    forward_metadata_planned_bs: int | None = None
    forward_metadata_planned_num_tokens: int | None = None
    forward_metadata_replan_equivalent: bool = False
    tbo_parent_token_range: tuple[int, int] | None = None
    tbo_children: list[Any] | None = None
    spec_info: Any = None


@dataclass
class ModelRunner:
    """Whose model it is."""

    is_draft_worker: bool = False


@dataclass
class Output:
    """ModelRunnerOutput."""

    can_run_graph: bool = False


def decode_batch(rows: int = 3, **changes: Any) -> ForwardBatch:
    """A decode batch of `rows` requests, five tokens each."""
    values: dict[str, Any] = {
        "forward_mode": Mode.DECODE,
        "batch_size": rows,
        "input_ids": Tensor(rows),
        "positions": Tensor(rows),
        "seq_lens": Tensor(rows),
        "seq_lens_cpu": HostTensor([5] * rows),
        "seq_lens_sum": 5 * rows,
        "lora_ids": [None] * rows,
    }
    return ForwardBatch(**{**values, **changes})


@dataclass
class Recorder:
    """A real ring with the state and the context of one process."""

    folder: Path
    writer: EventWriter = field(init=False)
    state: State = field(init=False)
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.writer = EventWriter.create(self.folder, size_bytes=1 << 20)
        self.state = State(self.writer)
        self.context = Context(self.state, ForwardBatch, lambda: 0)

    def hook(self, probe: Any, original: Callable[..., Any], name: str = "hook") -> Any:
        """`original` as SGLang would see it, with the probe around it."""
        hook = Hook(self.state, name, self.writer.hook(name, "found"))
        hooked = around(hook, probe, self.state, never)
        return lambda *args, **kwargs: hooked(original, *args, **kwargs)

    def recording(self) -> Recording:
        return seal([self.folder]).recording

    def events(self, kind: str | None = None) -> list[Event]:
        return [e for e in self.recording().events() if kind in (None, e.kind)]


def never() -> bool:
    """torch.compiler.is_compiling, outside a compilation."""
    return False
