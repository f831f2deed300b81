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
from padtrace.recording.absent import (
    HIGHEST_ABSENT_CODE,
    NOT_OBSERVED_CODE,
    Absent,
    value_of,
)
from padtrace.recording.columns import Int64Array
from padtrace.recording.value_tensors import ValueKey, ValueTensor

Value = int | str | None | Absent | list[int] | list[str] | dict[str, Any]
Snapshot = dict[str, Value]

# Of each table, how many rows are decoded together, and how many such chunks stay.
_CHUNK_ROWS, _KEPT_CHUNKS = 128, 8


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
        self._chunks: dict[int, list[tuple[int, ...]]] = {}

    def column(self, name: str) -> Int64Array:
        if name not in self._cache:
            loaded = self._load(name)
            if loaded is None:
                loaded = np.broadcast_to(np.int64(NOT_OBSERVED_CODE), (self.rows,))
            self._cache[name] = loaded
        return self._cache[name]

    def row(self, index: int, columns: tuple[schema.Column, ...]) -> tuple[int, ...]:
        """The codes of one row of all columns; rows become Python integers many at a time."""
        number, place = divmod(index, _CHUNK_ROWS)
        chunk = self._chunks.get(number)
        if chunk is None:
            rows = slice(number * _CHUNK_ROWS, (number + 1) * _CHUNK_ROWS)
            parts = [self.column(column.name)[rows].tolist() for column in columns]
            if len(self._chunks) == _KEPT_CHUNKS:
                del self._chunks[next(iter(self._chunks))]
            chunk = self._chunks[number] = list(zip(*parts, strict=True))
        return chunk[place]


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
        values: list[int] = self.vector_values[start:end].tolist()
        return values

    def snapshot(self, row: int) -> Snapshot:
        found = self._snapshots.get(row)
        if found is None:
            found = self._decode("snapshot", row, schema.SNAPSHOT.columns)
            self._snapshots[row] = found
        return found

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
        values: dict[str, Value] = {
            column.name: code if code > HIGHEST_ABSENT_CODE else value_of(code)
            for column, code in zip(columns, self.table(table).row(row, columns), strict=True)
        }
        for name, column_type in _REFERENCES[table]:
            code = values[name]
            if isinstance(code, int):
                values[name] = self._referred(column_type, code)
        return values

    def _referred(self, column_type: schema.ColumnType, value: int) -> Value:
        """What an index of this type stands for."""
        if column_type is schema.ColumnType.STRING:
            return self.strings[value]
        if column_type is schema.ColumnType.VECTOR:
            return self.vector(value)
        if column_type is schema.ColumnType.STRINGS:
            return [self.strings[index] for index in self.vector(value)]
        return self.snapshot(value)


_PLAIN_TYPES = (schema.ColumnType.INT, schema.ColumnType.BOOL)
_REFERENCES = {
    table.name: tuple((c.name, c.type) for c in table.columns if c.type not in _PLAIN_TYPES)
    for table in schema.all_tables()
}


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
