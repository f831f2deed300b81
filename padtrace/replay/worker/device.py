"""The device that SGLang is shown: a CPU engine, or the card that was recorded.

A worker shows one device for all its life, since SGLang asks for it while its modules are imported.
Nothing runs on it: every tensor stays on the CPU. What is shown is answered here, one query after
the other; a property of a card that SGLang reads and that is not known is refused by name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from padtrace.errors import UsageError
from padtrace.replay.devices import CPU, DEVICES, HIP
from padtrace.replay.worker.standins import StandIn


@dataclass(frozen=True, slots=True)
class Card:
    """What SGLang asks of a card.

    Attributes:
        capability: compute capability, major and minor.
        multi_processors: streaming multiprocessors of the card.
        memory_bytes: its memory.
    """

    name: str
    capability: tuple[int, int]
    multi_processors: int
    memory_bytes: int


# The cards that FlashMLA's paths are told apart by, as their data sheets give them.
_CARDS = {
    "sm90": Card("NVIDIA H200", (9, 0), 132, 141 << 30),
    "sm100": Card("NVIDIA B200", (10, 0), 148, 180 << 30),
}
# `server_args` and the DSA backend read the capability on any device, also where there is none.
_CAPABILITY_WITHOUT_CARD = (9, 0)


class Stream:
    """A stream of a device that is not there: order is the order of the program."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def prepare_environment(device: str) -> None:
    """Set the variables by which SGLang tells a CPU engine; before torch is imported.

    Raises:
        UsageError: no such device, or one that cannot be shown.
    """
    if device not in DEVICES:
        raise UsageError(
            f"cannot show SGLang the device {device!r}",
            f"devices are {', '.join(DEVICES)}",
            "name one of them",
        )
    if device == HIP:
        raise UsageError(
            "cannot show SGLang an AMD card",
            "its kernels (aiter) are imported while the attention backend is, and have no"
            " stand-in here",
            "replay with --device sm90, sm100 or cpu; the rows of an AMD server are not judged",
        )
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1" if device == CPU else "0"


def show(torch: Any, device: str) -> None:
    """Answer SGLang's queries of a device; before SGLang is imported."""
    cuda = torch.cuda
    _found["cuda"] = torch.version.cuda
    stream = Stream()
    cuda.current_stream = lambda device=None: stream
    cuda.synchronize = lambda device=None: None
    card = _CARDS.get(device)
    if card is None:
        cuda.get_device_capability = lambda device=None: _CAPABILITY_WITHOUT_CARD
        return
    # SGLang makes classes of it, so it must stay one.
    cuda.Stream = Stream
    cuda.stream = lambda stream: stream
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda device=None: card.name
    cuda.get_device_capability = lambda device=None: card.capability
    cuda.is_current_stream_capturing = lambda: False
    properties = StandIn(
        "device properties",
        {
            "name": card.name,
            "major": card.capability[0],
            "minor": card.capability[1],
            "multi_processor_count": card.multi_processors,
            "total_memory": card.memory_bytes,
        },
    )
    cuda.get_device_properties = lambda device=None: properties
    torch.version.cuda = "12.9"


_found: dict[str, str | None] = {}


def built_with_cuda(torch: Any) -> bool:
    """Whether this torch can call a GPU's kernels, whatever SGLang is shown."""
    return _found.get("cuda", torch.version.cuda) is not None


def multi_processors(device: str) -> int:
    """Streaming multiprocessors of the card shown; those of an H200 where none is."""
    return _CARDS.get(device, _CARDS["sm90"]).multi_processors
