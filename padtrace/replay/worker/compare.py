"""Holds a driven batch against the recorded one: event by event, in order, column by column.

Three rules follow from it, and none of them is applied here. On the release that was recorded every
recorded event must be met; a difference is a fault of the recording or of the driver, never a
finding about SGLang. On another SGLang the differences are the result. A batch that was not driven
is compared with nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from padtrace.recording.absent import Absent
from padtrace.recording.model import Value
from padtrace.replay.worker.events import RecordedEvent
from padtrace.replay.worker.tap import DrivenEvent

# A kernel of the indexer, which one attention layer does not call.
_INDEXER = ("fp8_paged_mqa_logits",)
_MAX_LISTED = 50

# Columns that are not compared, with the reason that is counted.
_NOT_COMPARED = {
    ("launch", "count"): "the number of layers: one layer is driven",
    ("launch", "k_cache.shape"): "the size of the KV cache: it holds no pages here",
    ("launch", "plan_seq"): "numbers of events differ; the plan's place is compared",
    ("launch", "tile_scheduler_metadata.rows"): "SM parts of the card that was recorded",
    ("plan", "backend_id"): "numbers of objects differ; which are the same is compared",
    ("error", "message"): "texts are redacted in a recording",
    ("error", "frames"): "one layer is driven",
    ("error", "function"): "one layer is driven",
    ("batch", "function"): "how a batch was made is an input",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not what was recorded; `recorded` and `driven` say it in words.

    Attributes:
        column: `kind.column`, for a snapshot `kind.entry.column`; "order" for other events.
        index: place of the recorded event in its group.
    """

    column: str
    recorded: str
    driven: str
    index: int


@dataclass(slots=True)
class Comparison:
    """What came of comparing.

    Attributes:
        events, values: compared, how many of each.
        differences: all that differ.
        not_compared: reason to number of values.
    """

    events: int = 0
    values: int = 0
    differences: list[Difference] = field(default_factory=list)
    not_compared: Counter[str] = field(default_factory=Counter)


_PEER_ENDED = "another rank had died, and a collective failed with it"


class Comparer:
    """Compares the batches of one process; which backend is which must stay the same in all."""

    def __init__(self) -> None:
        self._driven_backend: dict[int, int] = {}
        self._recorded_backend: dict[int, int] = {}

    def compare(self, recorded: list[RecordedEvent], driven: list[DrivenEvent]) -> Comparison:
        """Hold the events of one batch against each other."""
        result = Comparison()
        wanted = [
            (index, event)
            for index, event in enumerate(recorded)
            if self._is_compared(event, result)
        ]
        ended = next((at for at, (_, event) in enumerate(wanted) if _of_a_peer(event)), None)
        if ended is not None and len(driven) >= ended:
            # Ranks are driven one by one, so no collective fails here.
            result.not_compared[_PEER_ENDED] += len(wanted) - ended
            wanted, driven = wanted[:ended], driven[:ended]
        if _names(event for _, event in wanted) != _names(driven):
            result.differences.append(_order(wanted, driven))
            return result
        places = {event.entered: place for place, event in enumerate(driven)}
        recorded_places = {event.entered: place for place, (_, event) in enumerate(wanted)}
        for (index, one), other in zip(wanted, driven, strict=True):
            result.events += 1
            self._columns(index, one, other, result, peer_ended=ended is not None)
            self._plan_of(index, one, other, (recorded_places, places), result)
        return result

    def _is_compared(self, event: RecordedEvent, result: Comparison) -> bool:
        if event.kind == "graph":
            result.not_compared["graph runners are judged, not driven"] += 1
            return False
        if event.kind == "launch" and event.text("function") in _INDEXER:
            result.not_compared[f"launch of {event.text('function')}: no indexer is driven"] += 1
            return False
        return True

    def _columns(
        self,
        index: int,
        one: RecordedEvent,
        other: DrivenEvent,
        result: Comparison,
        *,
        peer_ended: bool,
    ) -> None:
        for name, value in other.values.items():
            reason = _NOT_COMPARED.get((one.kind, name))
            if peer_ended and (one.kind, name) == ("forward", "failed"):
                reason = _PEER_ENDED
            if reason is not None:
                result.not_compared[reason] += 1
                if name == "backend_id":
                    self._backend(index, one["backend_id"], value, result)
                continue
            self._value(index, f"{one.kind}.{name}", one[name], value, result)

    def _value(
        self, index: int, column: str, recorded: Value, driven: Value, result: Comparison
    ) -> None:
        if isinstance(recorded, dict) and isinstance(driven, dict):
            for name, value in recorded.items():
                self._value(index, f"{column}.{name}", value, driven[name], result)
            return
        if recorded is Absent.NOT_OBSERVED:
            return
        if driven is Absent.NOT_OBSERVED:
            result.not_compared[f"{column}: nothing is seen of it here"] += 1
            return
        result.values += 1
        if recorded != driven:
            told = Difference(column, _text(recorded), _text(driven), index)
            result.differences.append(told)

    def _backend(self, index: int, recorded: Value, driven: Value, result: Comparison) -> None:
        """Two plans of one object there must be two plans of one object here."""
        if not isinstance(recorded, int) or not isinstance(driven, int):
            return
        result.values += 1
        here = self._driven_backend.setdefault(recorded, driven)
        there = self._recorded_backend.setdefault(driven, recorded)
        if (here, there) != (driven, recorded):
            told = Difference("plan.backend_id", f"object {recorded}", f"object {driven}", index)
            result.differences.append(told)

    def _plan_of(
        self,
        index: int,
        one: RecordedEvent,
        other: DrivenEvent,
        places: tuple[dict[int, int], dict[int, int]],
        result: Comparison,
    ) -> None:
        if one.kind != "launch":
            return
        recorded, driven = one.integer("plan_seq"), other.values["plan_seq"]
        if recorded is None or not isinstance(driven, int):
            return
        result.values += 1
        there, here = places[0].get(recorded), places[1].get(driven)
        if there != here:
            told = Difference("launch.plan_seq", f"event {there}", f"event {here}", index)
            result.differences.append(told)


class Reproduced:
    """The comparisons of a whole recording, for its coverage."""

    def __init__(self) -> None:
        self._events = self._values = self._different = 0
        self._not_compared: Counter[str] = Counter()
        self._listed: list[dict[str, Any]] = []

    def add(self, process: int, recorded: list[RecordedEvent], comparison: Comparison) -> None:
        self._events += comparison.events
        self._values += comparison.values
        self._different += len(comparison.differences)
        self._not_compared.update(comparison.not_compared)
        for one in comparison.differences:
            if len(self._listed) < _MAX_LISTED:
                self._listed.append(
                    {
                        "process": process,
                        "enter_seq": recorded[one.index].integer("enter_seq"),
                        "column": one.column,
                        "recorded": one.recorded,
                        "driven": one.driven,
                    }
                )

    def summary(self) -> dict[str, Any]:
        return {
            "events": self._events,
            "values": self._values,
            "different": self._different,
            "differences": self._listed,
            "not_compared": dict(self._not_compared),
        }


def _of_a_peer(event: RecordedEvent) -> bool:
    """Whether a collective failed, as it does on every rank when one of them has died."""
    if event.kind != "error":
        return False
    frames = event["frames"]
    last = frames[-1] if isinstance(frames, list) and frames else ""
    return str(last).startswith("torch/distributed/")


def _names(events: Iterator[RecordedEvent] | list[DrivenEvent]) -> list[str]:
    """What happened, in order: kinds, and the function where there are several."""
    return [_name(event) for event in events]


def _name(event: RecordedEvent | DrivenEvent) -> str:
    if event.kind in ("plan", "launch"):
        value = event["function"] if isinstance(event, RecordedEvent) else event.values["function"]
        return f"{event.kind} {value}"
    return event.kind


def _order(wanted: list[tuple[int, RecordedEvent]], driven: list[DrivenEvent]) -> Difference:
    """The first place where other things happen."""
    there, here = _names(event for _, event in wanted), _names(driven)
    place = next(
        (place for place, pair in enumerate(zip(there, here, strict=False)) if pair[0] != pair[1]),
        min(len(there), len(here)),
    )
    index = wanted[min(place, len(wanted) - 1)][0] if wanted else 0
    names = [names[place] if place < len(names) else "nothing" for names in (there, here)]
    return Difference("order", names[0], names[1], index)


def _text(value: Value) -> str:
    return str(value)[:200]
