"""Rows of the replayed recording: driven events, or copies of recorded ones, numbered anew.

The events of a process are numbered batch after batch, in the order of the first recorded event
of each; within a batch in the order in which they happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from padtrace.recording import schema
from padtrace.recording.absent import HIGHEST_ABSENT_CODE, NOT_OBSERVED_CODE, Absent
from padtrace.recording.model import Value
from padtrace.replay.worker.events import HEADER, RecordedEvent
from padtrace.replay.worker.provenance import Chain
from padtrace.replay.worker.tap import DrivenEvent

_AT = {name: place for place, name in enumerate(HEADER)}
_NOT_DRIVEN = ("count", "k_cache.shape", "tile_scheduler_metadata.rows")
_NUMBERS = ("enter_seq", "exit_seq", "parent")
_STRINGS = tuple(column.name for column in schema.HEADER if column.type is schema.ColumnType.STRING)


@dataclass(slots=True)
class ReplayedEvent:
    """One event to be written.

    Attributes:
        header: its columns, strings by their number in the recording that was replayed.
        worker: whose model runner, where it is not the recorded event's.
    """

    kind: str
    header: list[int]
    values: dict[str, Value]
    chains: dict[str, Chain] = field(default_factory=dict)
    worker: str | None = None


def of_driven(
    driven: Sequence[DrivenEvent],
    chains: dict[int, dict[str, Chain]],
    recorded: Sequence[RecordedEvent],
    first: int,
) -> list[ReplayedEvent]:
    """The events of a driven batch, with the places that the recorded ones have in the server.

    Args:
        recorded: of the same batch; step, phase and time are those of its forwards.
        first: the number that the first of them gets.
    """
    forwards = [event.header_codes() for event in recorded if event.kind == "forward"]
    base = recorded[0].header_codes()
    rest = _Rest(recorded)
    made = []
    for event in driven:
        number = event.header["forward"]
        inside = 0 <= number < len(forwards)
        header = list(forwards[number] if inside else base)
        header[_AT["forward"]] = forwards[number][_AT["forward"]] if inside else NOT_OBSERVED_CODE
        header[_AT["draft_step"]] = event.header["draft_step"]
        header[_AT["batch"]] = base[_AT["batch"]]
        for name in _NUMBERS:
            code = event.header[name]
            header[_AT[name]] = code + first if code > HIGHEST_ABSENT_CODE else code
        kept = chains.get(event.entered, {})
        values = event.values
        if event.kind == "launch":
            values = {**values, **rest.of(event)}
            if isinstance(values["plan_seq"], int):
                values["plan_seq"] += first
        made.append(ReplayedEvent(event.kind, header, values, kept))
    return made


class _Rest:
    """What a kernel call has that no padding decision makes: layers, size of the cache, SM parts.

    One layer without pages is driven, so these are the recorded call's, where there is one.
    """

    def __init__(self, recorded: Sequence[RecordedEvent]) -> None:
        self._calls: dict[str, list[RecordedEvent]] = {}
        for event in recorded:
            if event.kind == "launch":
                self._calls.setdefault(event.text("function") or "", []).append(event)

    def of(self, event: DrivenEvent) -> dict[str, Value]:
        """The columns of the next recorded call of the same kernel."""
        calls = self._calls.get(str(event.values["function"]))
        if not calls:
            return dict.fromkeys(_NOT_DRIVEN, Absent.NOT_OBSERVED)
        call = calls.pop(0)
        return {name: call[name] for name in _NOT_DRIVEN}


def of_recorded(recorded: Sequence[RecordedEvent], first: int) -> list[ReplayedEvent]:
    """Copies of the events of a batch that was not driven."""
    codes = [event.header_codes() for event in recorded]
    taken = {code[_AT[name]] for code in codes for name in _NUMBERS}
    order = sorted(number for number in taken if number > HIGHEST_ABSENT_CODE)
    numbers = {number: first + place for place, number in enumerate(order)}
    made = []
    for event, header in zip(recorded, codes, strict=True):
        for name in _NUMBERS:
            header[_AT[name]] = numbers.get(header[_AT[name]], header[_AT[name]])
        values = event.own()
        if event.kind == "launch" and isinstance(values["plan_seq"], int):
            values["plan_seq"] = numbers.get(values["plan_seq"], values["plan_seq"])
        made.append(ReplayedEvent(event.kind, header, values))
    return made


def next_number(events: Iterable[ReplayedEvent], first: int) -> int:
    """The number after the last that these events use."""
    return max(
        (event.header[_AT[name]] + 1 for event in events for name in ("enter_seq", "exit_seq")),
        default=first,
    )
