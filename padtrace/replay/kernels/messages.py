"""What the worker and the kernel process say to each other, in the frames of `replay/protocol`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from padtrace.replay.kernels.launch_shapes import LaunchLimits, LaunchShapes, Outcome

if TYPE_CHECKING:
    # It imports torch, which no message needs.
    from padtrace.replay.kernels.launch import LaunchResult

# The longest lists are those of a launch of 2 ** 20 rows, at five bytes a number.
MAX_FRAME_BYTES = 1 << 25
_MAX_TEXT = 4096
_MAX_HAZARDS = 64
_MAX_NUM_SPLITS = (1 << 20) + 1

_Text = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class Available(msgspec.Struct, tag="available", kw_only=True):
    """First answer, unasked: launches may come.

    Attributes:
        name: of the implementation, for reports.
        reason: one line; what was found, with the card of a real kernel.
    """

    name: _Text
    reason: _Text


class Launch(msgspec.Struct, tag="launch", kw_only=True):
    """Call the kernel once.

    Attributes:
        shapes: the launch.
        seed: for the random values.
        limits: bounds on memory and work.
    """

    shapes: LaunchShapes
    seed: int = 0
    limits: LaunchLimits = LaunchLimits()


class Judged(msgspec.Struct, tag="judged", kw_only=True):
    """A :class:`~padtrace.replay.kernels.launch.LaunchResult` without its tensors.

    Attributes:
        last: the CUDA context is lost, and the process ends with this answer.
    """

    kernel: _Text
    outcome: Outcome
    stage: Literal["plan", "decode"] | None
    error: _Text | None
    raw_error: _Text | None
    q_rows: _Count
    num_splits_rows: _Count | None
    num_splits: Annotated[tuple[_Int32, ...], msgspec.Meta(max_length=_MAX_NUM_SPLITS)] | None
    computed: bool
    hazards: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=_MAX_HAZARDS)]
    last: bool = False

    @classmethod
    def of(cls, result: LaunchResult, *, last: bool) -> Judged:
        """The message for a result; texts beyond the bound are cut."""
        return cls(
            kernel=result.kernel[:_MAX_TEXT],
            outcome=result.outcome,
            stage=result.stage,
            error=_cut(result.error),
            raw_error=_cut(result.raw_error),
            q_rows=result.q_rows,
            num_splits_rows=result.num_splits_rows,
            num_splits=result.num_splits,
            computed=result.computed,
            hazards=tuple(text[:_MAX_TEXT] for text in result.hazards[:_MAX_HAZARDS]),
            last=last,
        )


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:_MAX_TEXT]
