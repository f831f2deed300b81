"""Builds a Recording event by event: used by seal, make and replay alike."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padtrace.recording import schema
from padtrace.recording.absent import NOT_OBSERVED_CODE, Absent, code_of
from padtrace.recording.model import Recording, TableData, Value, columns_from


class RecordingBuilder:
    """Collects processes and events; `finish` gives the Recording.

    Values are given decoded (strings, lists, snapshot dictionaries); what is not given is "not
    observed". Strings, vectors and snapshots that repeat are stored once.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._about = dict(about)
        self._facts: list[dict[str, Any]] = []
        self._strings: dict[str, int] = {}
        self._vectors: dict[tuple[int, ...], int] = {}
        self._snapshots: dict[tuple[int, ...], int] = {}
        self._rows: dict[str, list[array[int]]] = {}
        for table in (schema.PROCESS, schema.SNAPSHOT):
            self._rows[table.name] = [array("q") for _ in table.columns]
        for kind in schema.EVENT_KINDS:
            self._rows[kind] = [array("q") for _ in schema.event_columns(kind)]

    def add_process(self, values: Mapping[str, Value], facts: Mapping[str, Any]) -> int:
        """Add one process; returns its row, the value of the column `process`."""
        self._facts.append(dict(facts))
        return self._append("process", schema.PROCESS.columns, values)

    def add_event(self, kind: str, values: Mapping[str, Value]) -> int:
        """Add one event; names that the schema does not have are a programming error."""
        return self._append(kind, schema.event_columns(kind), values)

    def finish(self, coverage: Mapping[str, Any] | None = None) -> Recording:
        tables: dict[str, TableData] = {}
        for name, columns in self._tables():
            arrays = {
                column.name: np.array(values, dtype=np.int64)
                for column, values in zip(columns, self._rows[name], strict=True)
            }
            rows = len(self._rows[name][0])
            tables[name] = TableData(name, rows, columns_from(arrays))
        offsets = np.zeros(len(self._vectors) + 1, dtype=np.int64)
        np.cumsum([len(vector) for vector in self._vectors], out=offsets[1:])
        flat = [value for vector in self._vectors for value in vector]
        tables["vector"] = TableData("vector", len(self._vectors), columns_from({}))
        return Recording(
            tables=tables,
            strings=list(self._strings),
            vector_values=np.array(flat, dtype=np.int64),
            vector_offsets=offsets,
            facts=self._facts,
            coverage=dict(coverage or {}),
            about=self._about,
        )

    def _tables(self) -> list[tuple[str, tuple[schema.Column, ...]]]:
        fixed = [(table.name, table.columns) for table in (schema.PROCESS, schema.SNAPSHOT)]
        return fixed + [(kind, schema.event_columns(kind)) for kind in schema.EVENT_KINDS]

    def _append(
        self, table: str, columns: tuple[schema.Column, ...], values: Mapping[str, Value]
    ) -> int:
        unknown = values.keys() - {column.name for column in columns}
        if unknown:
            raise KeyError(f"table {table} has no column {sorted(unknown)}")
        lists = self._rows[table]
        row = len(lists[0])
        for column, target in zip(columns, lists, strict=True):
            value = values.get(column.name, Absent.NOT_OBSERVED)
            target.append(self._code(column.type, value))
        return row

    def _code(self, column_type: schema.ColumnType, value: Value) -> int:
        if value.__class__ is int:
            return value
        if value is Absent.NOT_OBSERVED:
            return NOT_OBSERVED_CODE
        if isinstance(value, str):
            return self._strings.setdefault(value, len(self._strings))
        if isinstance(value, dict):
            return self.snapshot_row(value)
        if isinstance(value, (list, tuple)):
            if column_type is schema.ColumnType.STRINGS:
                return self._vector([self._code(schema.ColumnType.STRING, v) for v in value])
            return self._vector(value)
        return code_of(value)

    def _vector(self, values: Sequence[Any]) -> int:
        key = tuple(int(value) for value in values)
        return self._vectors.setdefault(key, len(self._vectors))

    def snapshot_row(self, values: Mapping[str, Value]) -> int:
        """Store a snapshot; returns its row, which a SNAPSHOT column takes in its place."""
        if values.keys() - _SNAPSHOT_NAMES:
            raise KeyError(f"a snapshot has no column {sorted(values.keys() - _SNAPSHOT_NAMES)}")
        get, encode = values.get, self._code
        key = tuple(
            [
                value
                if (value := get(name, Absent.NOT_OBSERVED)).__class__ is int
                else encode(column_type, value)
                for name, column_type in _SNAPSHOT_COLUMNS
            ]
        )
        row = self._snapshots.get(key)
        if row is None:
            row = self._snapshots[key] = len(self._snapshots)
            for target, code in zip(self._rows["snapshot"], key, strict=True):
                target.append(code)
        return row


_SNAPSHOT_COLUMNS = tuple((column.name, column.type) for column in schema.SNAPSHOT.columns)
_SNAPSHOT_NAMES = frozenset(schema.SNAPSHOT.names())
