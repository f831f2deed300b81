"""The events of one batch, in the order and nesting in which they were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from padtrace.recording import schema
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.model import Event, Recording

_HEADER = [column.name for column in schema.HEADER]
# Of the header, what an outcome depends on.
_RELEVANT = ("worker", "draft_step")
_RELEVANT_AT = [_HEADER.index(name) for name in _RELEVANT]
_PARENT_AT, _ENTER_AT, _BATCH_AT = (
    _HEADER.index(name) for name in ("parent", "enter_seq", "batch")
)


@dataclass(slots=True)
class Node:
    """One recorded event and what is nested in it.

    Attributes:
        index: position among the events of its group, in order of entry.
    """

    index: int
    event: Event
    children: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Group:
    """All events of one batch of one process.

    Attributes:
        rows: (kind, row) of each event in order of entry.
        key: equal for groups whose replay must be equal within one process topology.
    """

    rows: list[tuple[str, int]]
    key: tuple[object, ...]


class EventIndex:
    """Raw rows of a recording, for grouping without decoding."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._columns: dict[str, list[list[int]]] = {}
        for kind in schema.EVENT_KINDS:
            table = recording.table(kind)
            names = [column.name for column in schema.event_columns(kind)]
            columns = [table.column(name).tolist() for name in names]
            self._columns[kind] = [list(row) for row in zip(*columns, strict=True)]

    def groups(self, process: int) -> Iterator[Group]:
        """Groups of a process, in order of their first event."""
        collected: dict[int, list[tuple[int, str, int]]] = {}
        alone = -1
        for kind, rows in self._columns.items():
            for number, values in enumerate(rows):
                if values[0] != process:
                    continue
                batch = values[_BATCH_AT]
                if batch <= HIGHEST_ABSENT_CODE:
                    batch, alone = alone, alone - 1
                collected.setdefault(batch, []).append((values[_ENTER_AT], kind, number))
        for events in sorted(collected.values(), key=min):
            yield self._group(sorted(events))

    def _group(self, events: list[tuple[int, str, int]]) -> Group:
        position = {enter: index for index, (enter, _, _) in enumerate(events)}
        key: list[object] = []
        for _, kind, number in events:
            values = self._columns[kind][number]
            parent = position.get(values[_PARENT_AT], -1)
            relevant = tuple(values[at] for at in _RELEVANT_AT)
            key.append((kind, parent, relevant, tuple(values[len(_HEADER) :])))
        return Group([(kind, number) for _, kind, number in events], tuple(key))

    def tree(self, group: Group) -> list[Node]:
        """The outermost events of a group, the others nested in them."""
        nodes = [
            Node(index, self._recording.event(kind, number))
            for index, (kind, number) in enumerate(group.rows)
        ]
        by_enter = {node.event.integer("enter_seq"): node for node in nodes}
        roots: list[Node] = []
        for node in nodes:
            parent = node.event.integer("parent")
            holder = by_enter.get(parent) if parent is not None else None
            if holder is None or holder is node:
                roots.append(node)
            else:
                holder.children.append(node)
        return roots
