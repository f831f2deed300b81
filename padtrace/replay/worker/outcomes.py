"""What a replay of one batch gives: events with values, edits, and what was left out."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from padtrace.recording.model import Value
from padtrace.replay.worker.edits import Edit
from padtrace.replay.worker.provenance import Chain

_KEPT_FRAMES = 8


@dataclass(slots=True)
class Outcome:
    """One event of the replay: its own columns, and the recorded event it answers.

    Attributes:
        index: position of the recorded event in its group.
        chains: column name to the steps that made its value.
        ended: False where an exception left the event.
    """

    kind: str
    index: int
    values: dict[str, Value]
    chains: dict[str, Chain] = field(default_factory=dict)
    ended: bool = True


@dataclass(slots=True)
class LifeResult:
    """What one batch's replay gave.

    Attributes:
        not_replayed: reason to number of recorded events.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    not_replayed: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.not_replayed[reason] = self.not_replayed.get(reason, 0) + 1


class BatchEndedError(Exception):
    """SGLang raised inside an event; the rest of the batch is not replayed."""


def error_values(function: str, error: Exception) -> dict[str, Value]:
    """The columns of an error event: SGLang's own words, since a replay holds no user's data."""
    frames = [
        f"sglang/{frame.filename.replace(chr(92), '/').rsplit('/sglang/', 1)[1]}:{frame.lineno}"
        f" {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/sglang/" in frame.filename.replace(chr(92), "/")
    ]
    text = (str(error).splitlines() or [""])[0]
    return {
        "function": function,
        "type": type(error).__name__,
        "message": text[:500],
        "frames": frames[-_KEPT_FRAMES:],
    }
