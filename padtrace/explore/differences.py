"""Compares two recordings field by field and says where they first part.

Events are paired by process, batch, function and their order within these. Times, sequence numbers
and object numbers are not compared. What one side did not observe is ignored and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import to_builtins

from padtrace.contracts.evidence import pack
from padtrace.recording import about, coverage, schema
from padtrace.recording.absent import NO_ATTRIBUTE_CODE, NONE_CODE, NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array
from padtrace.recording.coverage import OutsideEdit
from padtrace.recording.model import Recording, Value, json_value

MAX_DIFFERENCES = 1000
_MAX_NAMES = 1 << 30
# What tells events of one batch apart besides their order; elsewhere releases rename functions.
_NAMING = frozenset(
    {("plan", "function"), ("pad", "function"), ("launch", "function"), ("graph", "runner")}
)
NOT_COMPARED = frozenset(
    {"process", "batch", "forward", "enter_seq", "exit_seq", "parent", "t_ns", "backend_id"}
    | {"plan_seq", "frames"}
)
_BY_CONTENT = (schema.ColumnType.VECTOR, schema.ColumnType.STRINGS)


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs in one pair of events.

    `field` is `kind.column`, for a snapshot `kind.entry.column`; `enter_seq` is the left side's.
    """

    field: str
    left: Value
    right: Value
    process: int
    rank: int | None
    step: int | None
    forward: int | None
    event: str
    enter_seq: int

    def as_json(self) -> dict[str, Any]:
        return {
            "field": self.field,
            "left": json_value(self.left),
            "right": json_value(self.right),
            "rank": self.rank,
            "step": self.step,
            "forward": self.forward,
            "event": self.event,
            "process": self.process,
            "enter_seq": self.enter_seq,
        }


@dataclass(slots=True)
class Differences:
    """What comparing two recordings gave.

    Attributes:
        differences: in the order of step, process and event; at most `MAX_DIFFERENCES`.
        by_field: how many pairs of events differ in each field.
        compared_events, compared_values: pairs, and values held against each other.
        ignored: values that could not be compared, by reason.
        only_left, only_right: events without a counterpart, by kind.
        outside_edits: edits between hooked functions that a replay applied as recorded.
        outside_edit_list: the same by field.
    """

    differences: list[Difference] = field(default_factory=list)
    by_field: dict[str, int] = field(default_factory=dict)
    compared_events: int = 0
    compared_values: int = 0
    ignored: dict[str, int] = field(default_factory=dict)
    only_left: dict[str, int] = field(default_factory=dict)
    only_right: dict[str, int] = field(default_factory=dict)
    outside_edits: int = 0
    outside_edit_list: list[OutsideEdit] = field(default_factory=list)
    unpaired_count: bool = False

    @property
    def total(self) -> int:
        return sum(self.by_field.values())

    @property
    def differ(self) -> bool:
        unpaired = self.unpaired_count and bool(self.only_left or self.only_right)
        return self.total > 0 or unpaired

    def as_json(self) -> list[dict[str, Any]]:
        return [difference.as_json() for difference in self.differences]

    def totals(self) -> dict[str, Any]:
        return {
            "compared_events": self.compared_events,
            "compared_values": self.compared_values,
            "different_values": self.total,
            "by_field": self.by_field,
            "ignored": self.ignored,
            "only_left": self.only_left,
            "only_right": self.only_right,
            "outside_edits": self.outside_edits,
            "outside_edit_list": [to_builtins(edit) for edit in self.outside_edit_list],
        }


@dataclass(frozen=True, slots=True)
class _Found:
    """Pairs that differ in one field, before decoding."""

    kind: str
    field: str
    column: schema.Column
    left: Int64Array
    right: Int64Array


def compare(left: Recording, right: Recording) -> Differences:
    """Hold every value that both recordings observed against its counterpart."""
    result = Differences()
    common = _Common(left, right)
    found: list[_Found] = []
    for kind in schema.EVENT_KINDS:
        pairs = _pairs(common, kind, result)
        if pairs[0].size:
            result.compared_events += int(pairs[0].size)
            found.extend(_compare_kind(common, kind, pairs, result))
    for item in found:
        result.by_field[item.field] = int(item.left.size)
    result.differences = _decode(common, found)
    _outside_edits(result, left, right)
    sources = {about.view(side.about).source for side in (left, right)}
    result.unpaired_count = "replay" not in sources
    return result


class _Common:
    """Both recordings with their strings and vectors under common numbers."""

    def __init__(self, left: Recording, right: Recording) -> None:
        self.sides = (left, right)
        strings: dict[str, int] = {}
        self.strings = [
            np.array([strings.setdefault(t, len(strings)) for t in side.strings], dtype=np.int64)
            for side in self.sides
        ]
        vectors: dict[tuple[int, ...], int] = {}
        self.vectors = [
            np.array(
                [
                    vectors.setdefault(tuple(side.vector(row)), len(vectors))
                    for row in range(side.rows("vector"))
                ],
                dtype=np.int64,
            )
            for side in self.sides
        ]
        self.processes = _match_processes(left, right)

    def column(self, side: int, table: str, column: schema.Column, rows: Int64Array) -> Int64Array:
        """Codes that are equal on both sides where the values are."""
        values = self.sides[side].table(table).column(column.name)[rows]
        return self.codes(side, column.type, values)

    def codes(self, side: int, kind: schema.ColumnType, values: Int64Array) -> Int64Array:
        if kind is schema.ColumnType.STRING:
            return _translate(values, self.strings[side])
        if kind in _BY_CONTENT:
            return _translate(values, self.vectors[side])
        return values


def _translate(values: Int64Array, numbers: Int64Array) -> Int64Array:
    known = values > NOT_OBSERVED_CODE
    if not numbers.size:
        return values
    return np.where(known, numbers[np.where(known, values, 0)], values)


def _match_processes(left: Recording, right: Recording) -> tuple[Int64Array, Int64Array]:
    """For each side, process row to common number: by rank where ranks are distinct, else row."""
    ranks = [side.table("process").column("global_rank") for side in (left, right)]
    distinct = all(
        np.unique(r).size == r.size and bool((r > NOT_OBSERVED_CODE).all()) for r in ranks
    )
    if distinct:
        return ranks[0], ranks[1]
    return np.arange(ranks[0].size), np.arange(ranks[1].size)


def _pairs(common: _Common, kind: str, result: Differences) -> tuple[Int64Array, Int64Array]:
    """Rows of one table that belong together."""
    keys = [_keys(common, side, kind) for side in (0, 1)]
    size = keys[0][0].size
    together = [np.concatenate(pair) for pair in zip(*keys, strict=True)]
    packed = pack(together) if together[0].size else np.zeros(0, dtype=np.int64)
    _, left, right = np.intersect1d(packed[:size], packed[size:], return_indices=True)
    for count, where in (
        (size - left.size, result.only_left),
        (packed.size - size - right.size, result.only_right),
    ):
        if count:
            where[kind] = int(count)
    order = np.argsort(left, kind="stable")
    return left[order].astype(np.int64), right[order].astype(np.int64)


def _keys(common: _Common, side: int, kind: str) -> list[Int64Array]:
    recording = common.sides[side]
    table = recording.table(kind)
    process = common.processes[side][table.column("process")]
    batch = table.column("batch")
    function = np.zeros(table.rows, dtype=np.int64)
    for column in schema.EVENT_TABLES[kind].columns:
        if (kind, column.name) in _NAMING:
            codes = common.column(side, kind, column, np.arange(table.rows))
            function = function * _MAX_NAMES + np.maximum(codes, -1) + 1
    occurrence = _occurrence(process, batch, function, table.column("enter_seq"))
    return [process, batch, function, occurrence]


def _occurrence(
    process: Int64Array, batch: Int64Array, function: Int64Array, entered: Int64Array
) -> Int64Array:
    """Number of each event among those of the same process, batch and function."""
    if not entered.size:
        return entered
    order = np.lexsort((entered, function, batch, process))
    changed = np.zeros(entered.size, dtype=np.bool_)
    for key in (process, batch, function):
        changed[1:] |= key[order][1:] != key[order][:-1]
    position = np.arange(entered.size)
    starts = np.maximum.accumulate(np.where(changed, position, 0))
    numbers = np.empty(entered.size, dtype=np.int64)
    numbers[order] = position - starts
    return numbers


def _compare_kind(
    common: _Common, kind: str, pairs: tuple[Int64Array, Int64Array], result: Differences
) -> list[_Found]:
    found: list[_Found] = []
    for column in schema.event_columns(kind):
        if column.name in NOT_COMPARED:
            continue
        if column.type is schema.ColumnType.SNAPSHOT:
            found.extend(_compare_snapshots(common, kind, column, pairs, result))
            continue
        codes = [common.column(side, kind, column, pairs[side]) for side in (0, 1)]
        found.extend(_compare_codes(kind, f"{kind}.{column.name}", column, codes, pairs, result))
    return found


def _compare_snapshots(
    common: _Common,
    kind: str,
    which: schema.Column,
    pairs: tuple[Int64Array, Int64Array],
    result: Differences,
) -> list[_Found]:
    index = [common.sides[s].table(kind).column(which.name)[pairs[s]] for s in (0, 1)]
    both = (index[0] > NOT_OBSERVED_CODE) & (index[1] > NOT_OBSERVED_CODE)
    missing = int((~both).sum()) * len(schema.SNAPSHOT.columns)
    _ignore(result, "not observed", missing)
    kept = (pairs[0][both], pairs[1][both])
    found: list[_Found] = []
    for column in schema.SNAPSHOT.columns:
        codes = [common.column(s, "snapshot", column, index[s][both]) for s in (0, 1)]
        name = f"{kind}.{which.name}.{column.name}"
        found.extend(_compare_codes(kind, name, column, codes, kept, result))
    return found


def _compare_codes(
    kind: str,
    name: str,
    column: schema.Column,
    codes: list[Int64Array],
    pairs: tuple[Int64Array, Int64Array],
    result: Differences,
) -> list[_Found]:
    left, right = codes
    unseen = (left == NOT_OBSERVED_CODE) | (right == NOT_OBSERVED_CODE)
    _ignore(result, "not observed", int(unseen.sum()))
    absent = (left == NO_ATTRIBUTE_CODE, right == NO_ATTRIBUTE_CODE)
    missing = ~unseen & (absent[0] != absent[1])
    _ignore(result, "no such attribute in one of the releases", int((missing).sum()))
    # Two equal absences are no evidence of agreement.
    both_none = (left == right) & ((left == NONE_CODE) | absent[0])
    compared = ~unseen & ~missing & ~both_none
    result.compared_values += int(compared.sum())
    differ = compared & (left != right)
    if not differ.any():
        return []
    return [_Found(kind, name, column, pairs[0][differ], pairs[1][differ])]


def _ignore(result: Differences, reason: str, count: int) -> None:
    if count:
        result.ignored[reason] = result.ignored.get(reason, 0) + count


def _decode(common: _Common, found: list[_Found]) -> list[Difference]:
    """The first differences in the order in which they happened."""
    if not found:
        return []
    left = common.sides[0]
    which = np.concatenate([np.full(item.left.size, i) for i, item in enumerate(found)])
    place = np.concatenate([np.arange(item.left.size) for item in found])
    columns = {
        name: np.concatenate([left.table(i.kind).column(name)[i.left] for i in found])
        for name in ("step", "process", "enter_seq")
    }
    order = np.lexsort((which, columns["enter_seq"], columns["process"], columns["step"]))
    return [
        _difference(common, found[int(which[k])], int(place[k])) for k in order[:MAX_DIFFERENCES]
    ]


def _difference(common: _Common, item: _Found, index: int) -> Difference:
    rows = (int(item.left[index]), int(item.right[index]))
    events = [common.sides[side].event(item.kind, rows[side]) for side in (0, 1)]
    path = item.field.split(".", 1)[1]
    values = [_value(event.values, path, item.column.name) for event in events]
    process = events[0].integer("process") or 0
    rank = common.sides[0].process(process).get("global_rank")
    return Difference(
        field=item.field,
        left=values[0],
        right=values[1],
        process=process,
        rank=rank if isinstance(rank, int) else None,
        step=events[0].integer("step"),
        forward=events[0].integer("forward"),
        event=item.kind,
        enter_seq=events[0].integer("enter_seq") or 0,
    )


def _value(values: dict[str, Value], path: str, column: str) -> Value:
    if path in values and path == column:
        return values[path]
    snapshot = values[path.split(".", 1)[0]]
    return snapshot[column] if isinstance(snapshot, dict) else snapshot


def _outside_edits(result: Differences, *recordings: Recording) -> None:
    for recording in recordings:
        replay = coverage.view(recording.coverage).replay
        if replay is not None:
            result.outside_edits += replay.outside_edits
            result.outside_edit_list += replay.outside_edit_list
