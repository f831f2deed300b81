"""A Recording in memory: tables of int64 columns, strings, facts, coverage.

Columns are decoded when first asked for, so that a check touches only what it reads. Contracts
work on columns; people and replay work on `Event` objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padtrace.recording import schema
from padtrace.recording.absent import NOT_OBSERVED_CODE, Absent, value_of
from padtrace.recording.columns import Int64Array
from padtrace.recording.value_tensors import ValueKey, ValueTensor

Value = int | str | None | Absent | list[int] | list[str] | dict[str, Any]
Snapshot = dict[str, Value]


class TableData:
    """The columns of one table.

    `column(name)` is int64 of shape (rows,); a column the file does not have (written by an older
    padtrace) reads as "not observed" in every row.
    """

    def __init__(self, name: str, rows: int, load: Callable[[str], Int64Array | None]) -> None:
        self.name = name
        self.rows = rows
        self._load = load
        self._cache: dict[str, Int64Array] = {}

    def column(self, name: str) -> Int64Array:
        if name not in self._cache:
            loaded = self._load(name)
            if loaded is None:
                loaded = np.broadcast_to(np.int64(NOT_OBSERVED_CODE), (self.rows,))
            self._cache[name] = loaded
        return self._cache[name]

    def row(self, index: int, columns: tuple[schema.Column, ...]) -> list[int]:
        return [int(self.column(column.name)[index]) for column in columns]


@dataclass(frozen=True, slots=True)
class Event:
    """One event with its values decoded: strings, lists and snapshots instead of indices."""

    kind: str
    row: int
    values: dict[str, Value]

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def integer(self, name: str) -> int | None:
        """The value if it is a real integer, otherwise None."""
        value = self.values.get(name)
        return value if isinstance(value, int) else None

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        return value if isinstance(value, str) else None

    def snapshot(self, name: str) -> Snapshot | None:
        value = self.values.get(name)
        return value if isinstance(value, dict) else None

    def vector(self, name: str) -> list[int] | None:
        value = self.values.get(name)
        return value if isinstance(value, list) else None  # type: ignore[return-value]


@dataclass(slots=True)
class Recording:
    """Everything one file holds.

    Attributes:
        tables: by name, see `recording.schema`.
        strings: what string columns index.
        vector_values, vector_offsets: the ragged table `vector`; row i is
            `vector_values[vector_offsets[i]:vector_offsets[i + 1]]`.
        facts: one JSON object per process, in process order (design 4.2, "facts").
        coverage: JSON object; see `record` for its keys.
        about: format version, producer, tier, what it was made from.
        values: values of device tensors; empty with tier `shape`.
    """

    tables: dict[str, TableData]
    strings: list[str]
    vector_values: Int64Array
    vector_offsets: Int64Array
    facts: list[dict[str, Any]]
    coverage: dict[str, Any]
    about: dict[str, Any]
    values: dict[ValueKey, ValueTensor] = field(default_factory=dict)
    _snapshots: dict[int, Snapshot] = field(default_factory=dict)

    def table(self, name: str) -> TableData:
        return self.tables[name]

    def rows(self, name: str) -> int:
        return self.tables[name].rows

    def string_id(self, text: str) -> int:
        """Index of a string, or -1 if no row can hold it (for fast column comparisons)."""
        try:
            return self.strings.index(text)
        except ValueError:
            return -1

    def vector(self, row: int) -> list[int]:
        start, end = int(self.vector_offsets[row]), int(self.vector_offsets[row + 1])
        return [int(value) for value in self.vector_values[start:end]]

    def snapshot(self, row: int) -> Snapshot:
        if row not in self._snapshots:
            self._snapshots[row] = self._decode("snapshot", row, schema.SNAPSHOT.columns)
        return self._snapshots[row]

    def process(self, index: int) -> dict[str, Value]:
        return self._decode("process", index, schema.PROCESS.columns)

    def event(self, kind: str, row: int) -> Event:
        return Event(kind, row, self._decode(kind, row, schema.event_columns(kind)))

    def order(self) -> list[tuple[str, int]]:
        """(kind, row) of every event, by process and order of entry."""
        parts = [
            (self.table(kind).column("process"), self.table(kind).column("enter_seq"))
            for kind in schema.EVENT_KINDS
        ]
        kinds = np.concatenate([np.full(p.size, i) for i, (p, _) in enumerate(parts)])
        rows = np.concatenate([np.arange(p.size) for p, _ in parts])
        processes = np.concatenate([p for p, _ in parts])
        entered = np.concatenate([e for _, e in parts])
        ordered = np.lexsort((entered, processes))
        return [(schema.EVENT_KINDS[int(kinds[i])], int(rows[i])) for i in ordered]

    def events(
        self,
        *,
        process: int | None = None,
        step: int | None = None,
        forward: int | None = None,
    ) -> Iterator[Event]:
        """Events in order, optionally only those of one process, step or forward."""
        wanted = {"process": process, "step": step, "forward": forward}
        for kind, row in self.order():
            table = self.table(kind)
            if all(v is None or int(table.column(n)[row]) == v for n, v in wanted.items()):
                yield self.event(kind, row)

    def _decode(self, table: str, row: int, columns: tuple[schema.Column, ...]) -> dict[str, Value]:
        data = self.table(table)
        return {
            column.name: self._value(column.type, int(data.column(column.name)[row]))
            for column in columns
        }

    def _value(self, column_type: schema.ColumnType, code: int) -> Value:
        value = value_of(code)
        if not isinstance(value, int):
            return value
        if column_type is schema.ColumnType.STRING:
            return self.strings[value]
        if column_type is schema.ColumnType.VECTOR:
            return self.vector(value)
        if column_type is schema.ColumnType.STRINGS:
            return [self.strings[index] for index in self.vector(value)]
        if column_type is schema.ColumnType.SNAPSHOT:
            return self.snapshot(value)
        return value


def json_value(value: Value) -> Any:
    """A value as `--json` prints it: None is null, other absents are their words."""
    if isinstance(value, Absent):
        return value.value
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    return value


def columns_from(arrays: Mapping[str, Int64Array]) -> Callable[[str], Int64Array | None]:
    """A column loader over arrays that are in memory already."""
    return arrays.get
