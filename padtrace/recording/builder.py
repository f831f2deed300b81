"""Builds a Recording event by event: used by seal, make and replay alike."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import is_not, itemgetter
from typing import Any

import numpy as np

from padtrace.recording import limits, schema
from padtrace.recording.absent import NONE_CODE, NOT_OBSERVED_CODE, Absent, code_of
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
        # The snapshot stored last, as given and as codes.
        self._last_snapshot: tuple[tuple[Any, ...], list[int]] = (
            (object(),) * len(_SNAPSHOT_NAMES),
            [NOT_OBSERVED_CODE] * len(_SNAPSHOT_NAMES),
        )
        self._rows: dict[str, list[array[int]]] = {}
        for table in (schema.PROCESS, schema.SNAPSHOT):
            self._rows[table.name] = [array("q") for _ in table.columns]
        for kind in schema.EVENT_KINDS:
            self._rows[kind] = [array("q") for _ in schema.event_columns(kind)]
        # Whole rows, moved into the columns many at a time.
        self._pending: dict[str, list[Sequence[int]]] = {name: [] for name in self._rows}
        self._counts = dict.fromkeys(self._rows, 0)

    def add_process(self, values: Mapping[str, Value], facts: Mapping[str, Any]) -> int:
        """Add one process; returns its row, the value of the column `process`."""
        self._facts.append(dict(facts))
        return self._append("process", [], values)

    def add_event(self, kind: str, values: Mapping[str, Value]) -> int:
        """Add one event; names that the schema does not have are a programming error."""
        return self._append(kind, [], values)

    def add_encoded(self, kind: str, first: Sequence[int], values: Mapping[str, Value]) -> int:
        """Add one event whose first columns are encoded already, strings by `string_code`."""
        return self._append(kind, first, values)

    def string_code(self, text: str) -> int:
        """The number that stands for a string in a STRING column."""
        code = self._strings.get(text)
        if code is None:
            # The last place is for all that there is no room for.
            if len(self._strings) >= limits.MAX_STRINGS - 1:
                text = limits.TOO_MANY_STRINGS
            code = self._strings.setdefault(text, len(self._strings))
        return code

    def finish(self, coverage: Mapping[str, Any] | None = None) -> Recording:
        tables: dict[str, TableData] = {}
        for name, columns in _COLUMNS.items():
            self._flush(name)
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

    def _append(self, table: str, first: Sequence[int], values: Mapping[str, Value]) -> int:
        places = _PLACES[table]
        codes = [*first, *_NOTHING[table][len(first) :]]
        for name, value in values.items():
            if name not in places:
                raise KeyError(f"table {table} has no column {name}")
            place, column_type = places[name]
            if value is None:
                codes[place] = NONE_CODE
            elif value.__class__ is int:
                codes[place] = value
            else:
                codes[place] = self._code(column_type, value)
        return self._keep(table, codes)

    def _keep(self, table: str, codes: Sequence[int]) -> int:
        pending = self._pending[table]
        pending.append(codes)
        if len(pending) == _PENDING_ROWS:
            self._flush(table)
        self._counts[table] += 1
        return self._counts[table] - 1

    def _flush(self, table: str) -> None:
        pending = self._pending[table]
        if pending:
            matrix = np.array(pending, dtype=np.int64)
            for column, target in zip(matrix.T, self._rows[table], strict=True):
                target.frombytes(np.ascontiguousarray(column).tobytes())
            pending.clear()

    def _code(self, column_type: schema.ColumnType, value: Value) -> int:
        if value.__class__ is int:
            return value
        if value is Absent.NOT_OBSERVED:
            return NOT_OBSERVED_CODE
        if isinstance(value, str):
            return self.string_code(value)
        if isinstance(value, dict):
            return self.snapshot_row(value)
        if isinstance(value, (list, tuple)):
            if column_type is schema.ColumnType.STRINGS:
                return self._vector([self._code(schema.ColumnType.STRING, v) for v in value])
            return self._vector(value)
        return code_of(value)

    def _vector(self, values: Sequence[Any]) -> int:
        key = tuple(map(int, values))
        return self._vectors.setdefault(key, len(self._vectors))

    def snapshot_row(self, values: Mapping[str, Value]) -> int:
        """Store a snapshot; returns its row, which a SNAPSHOT column takes in its place."""
        try:
            seen = _SNAPSHOT_VALUES(values)
            known = len(values) == len(seen)
        except KeyError:
            seen = tuple([values.get(name, Absent.NOT_OBSERVED) for name in _SNAPSHOT_NAMES])
            known = values.keys() <= _SNAPSHOT_KNOWN
        if not known:
            raise KeyError(f"a snapshot has no column {sorted(values.keys() - _SNAPSHOT_KNOWN)}")
        # One is much like the one before it, but a list may be the same and hold other numbers.
        last, codes = self._last_snapshot
        changed = {*compress(_SNAPSHOT_INDICES, map(is_not, seen, last))}.union(_SNAPSHOT_LISTS)
        for place in sorted(changed):
            value = seen[place]
            if value is None:
                codes[place] = NONE_CODE
            elif value.__class__ is int:
                codes[place] = value
            else:
                codes[place] = self._code(_SNAPSHOT_TYPES[place], value)
        self._last_snapshot = (seen, codes)
        key = tuple(codes)
        row = self._snapshots.get(key)
        if row is None:
            row = self._snapshots[key] = self._keep("snapshot", key)
        return row


_PENDING_ROWS = 2048
_SNAPSHOT_NAMES = schema.SNAPSHOT.names()
_SNAPSHOT_TYPES = tuple(column.type for column in schema.SNAPSHOT.columns)
_SNAPSHOT_KNOWN = frozenset(_SNAPSHOT_NAMES)
_SNAPSHOT_INDICES = range(len(_SNAPSHOT_NAMES))
_SNAPSHOT_LISTS = tuple(
    place for place, of in enumerate(_SNAPSHOT_TYPES) if of is schema.ColumnType.VECTOR
)
_SNAPSHOT_VALUES = itemgetter(*_SNAPSHOT_NAMES)
_COLUMNS = {
    **{table.name: table.columns for table in (schema.PROCESS, schema.SNAPSHOT)},
    **{kind: schema.event_columns(kind) for kind in schema.EVENT_KINDS},
}
_PLACES = {
    table: {column.name: (place, column.type) for place, column in enumerate(columns)}
    for table, columns in _COLUMNS.items()
}
_NOTHING = {table: [NOT_OBSERVED_CODE] * len(columns) for table, columns in _COLUMNS.items()}
