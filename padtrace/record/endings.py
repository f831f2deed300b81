"""How each recorded process ended: which rank died first is the first question after a crash.

A rank that is killed leaves neither an error nor a closed ring. The others then fail in a
collective, which is an error of theirs, or are ended by SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from padtrace.record import wire
from padtrace.record.ring_reader import Ring
from padtrace.recording.absent import HIGHEST_ABSENT_CODE


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one process.

    Attributes:
        rank: global rank; None if the process never said.
        closed: the ring was closed in good order.
        failed: an exception left a hooked function.
        where: what it was last seen doing, for a sentence.
    """

    rank: int | None
    closed: bool
    failed: bool
    where: str

    @property
    def sudden(self) -> bool:
        return not self.closed and not self.failed


def ending_of(ring: Ring, rank: int | None) -> Ending:
    """Read before the events of the ring are let go."""
    errors = ring.events.get("error")
    failed = errors is not None and len(errors.scalars) > 0
    return Ending(rank, ring.counters["complete"] == 1, failed, _last_seen(ring))


def ended_suddenly(endings: Sequence[Ending]) -> list[int]:
    """Ranks that ended without a word while others did not; [] where all ended alike.

    All of them ending so is how a server is stopped: SGLang kills its processes.
    """
    sudden = [ending for ending in endings if ending.sudden]
    if len(sudden) == len(endings):
        return []
    return [ending.rank for ending in sudden if ending.rank is not None]


def notes(endings: Sequence[Ending]) -> list[str]:
    """One line for each rank that `ended_suddenly` names."""
    named = ended_suddenly(endings)
    return [
        f"rank {ending.rank} ended suddenly: no error of its own, not closed; {ending.where}"
        for ending in endings
        if ending.sudden and ending.rank in named
    ]


def _last_seen(ring: Ring) -> str:
    block = ring.events.get("forward")
    if block is None or not len(block.scalars):
        return "it made no forward"
    names = wire.layout("forward")
    enter, leave = (block.scalars[:, names.index(name)] for name in ("enter_seq", "exit_seq"))
    last = int(enter.argmax())
    number, step = (int(block.scalars[last, names.index(name)]) for name in ("forward", "step"))
    inside = int(leave[last]) <= HIGHEST_ABSENT_CODE
    return f"last seen {'inside' if inside else 'after'} forward {number} of step {step}"
