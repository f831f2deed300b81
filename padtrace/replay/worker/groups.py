"""The events of one batch, in the order and nesting in which they were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from padtrace.recording import schema
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.model import Recording
from padtrace.replay.worker.events import HEADER, RecordedEvent

_PARENT_AT, _ENTER_AT, _BATCH_AT, _WORKER_AT, _STEP_AT = (
    HEADER.index(name) for name in ("parent", "enter_seq", "batch", "worker", "draft_step")
)


@dataclass(slots=True)
class Node:
    """One recorded event and what is nested in it.

    Attributes:
        index: position among the events of its group, in order of entry.
    """

    index: int
    event: RecordedEvent
    children: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Group:
    """All events of one batch of one process.

    Attributes:
        events: in order of entry.
        key: equal for groups whose replay must be equal within one process topology.
    """

    events: list[RecordedEvent]
    key: tuple[object, ...]

    def tree(self) -> list[Node]:
        """The outermost events, the others nested in them."""
        nodes = [Node(index, event) for index, event in enumerate(self.events)]
        places = [event.place for event in self.events]
        by_enter = {enter: node for (enter, _), node in zip(places, nodes, strict=True)}
        roots: list[Node] = []
        for node, (_, parent) in zip(nodes, places, strict=True):
            holder = by_enter.get(parent) if parent > HIGHEST_ABSENT_CODE else None
            (roots if holder is None or holder is node else holder.children).append(node)
        return roots


class EventIndex:
    """The raw rows of a recording, by process."""

    def __init__(self, recording: Recording, processes: range) -> None:
        self._recording = recording
        # (batch, enter_seq, kind, raw columns) per process.
        self._rows: dict[int, list[tuple[int, int, str, list[int]]]] = {}
        for kind in schema.EVENT_KINDS:
            table = recording.table(kind)
            names = [column.name for column in schema.event_columns(kind)]
            process = table.column(names[0])
            asked = (process >= processes.start) & (process < processes.stop)
            columns = [table.column(name)[asked].tolist() for name in names]
            for values in zip(*columns, strict=True):
                raw = list(values)
                entry = (raw[_BATCH_AT], raw[_ENTER_AT], kind, raw)
                self._rows.setdefault(raw[0], []).append(entry)

    def groups(self, process: int) -> Iterator[Group]:
        """Groups of a process, in order of their first event."""
        collected: dict[int, list[tuple[int, str, list[int]]]] = {}
        alone = -1
        for batch, enter, kind, raw in self._rows.get(process, []):
            if batch <= HIGHEST_ABSENT_CODE:
                # An event of no batch is a group of its own.
                batch, alone = alone, alone - 1
            collected.setdefault(batch, []).append((enter, kind, raw))
        for events in collected.values():
            events.sort()
        for events in sorted(collected.values(), key=lambda events: events[0]):
            yield self._group(events)

    def _group(self, events: list[tuple[int, str, list[int]]]) -> Group:
        position = {enter: index for index, (enter, _, _) in enumerate(events)}
        key = tuple(
            (
                kind,
                position.get(raw[_PARENT_AT], -1),
                raw[_WORKER_AT],
                raw[_STEP_AT],
                tuple(raw[len(HEADER) :]),
            )
            for _, kind, raw in events
        )
        made = [RecordedEvent(kind, raw, self._recording) for _, kind, raw in events]
        return Group(made, key)
