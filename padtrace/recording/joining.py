"""Several recordings as one: their processes one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padtrace.recording import schema
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.columns import Int64Array
from padtrace.recording.model import Recording

_TYPES = schema.ColumnType


def join(parts: Sequence[Recording]) -> Recording:
    """The processes and events of all parts; strings, vectors and snapshots stored once.

    `about` and `coverage` are those of the first part. Values of tensors are not taken over.
    """
    joined = _Joiner(parts[0].about)
    for part in parts:
        joined.add(part)
    return joined.finish(parts[0].coverage)


class _Joiner(RecordingBuilder):
    """A RecordingBuilder that takes whole recordings, column by column."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        super().__init__(about)
        # Rows of the table of snapshots, by their codes.
        self._taken: dict[bytes, int] = {}

    def add(self, part: Recording) -> None:
        """Append the processes of a recording with all their events."""
        first = self._counts["process"]
        self._facts += part.facts
        numbers = _Numbers(self, part)
        numbers.snapshots = self._add_snapshots(part, numbers)
        self._add_rows("process", part, schema.PROCESS.columns, numbers, first)
        for kind in schema.EVENT_KINDS:
            self._add_rows(kind, part, schema.event_columns(kind), numbers, first)

    def _add_rows(
        self,
        table: str,
        part: Recording,
        columns: Sequence[schema.Column],
        numbers: _Numbers,
        first: int,
    ) -> None:
        self._flush(table)
        for column, target in zip(columns, self._rows[table], strict=True):
            codes = numbers.of(column, part.table(table).column(column.name))
            if column.name == "process":
                codes = np.where(codes > HIGHEST_ABSENT_CODE, codes + first, codes)
            target.frombytes(np.ascontiguousarray(codes, dtype=np.int64).tobytes())
        self._counts[table] += part.rows(table)

    def _add_snapshots(self, part: Recording, numbers: _Numbers) -> Int64Array:
        """Rows in the joined recording, by row of the part."""
        table = part.table(schema.SNAPSHOT.name)
        columns = [numbers.of(c, table.column(c.name)) for c in schema.SNAPSHOT.columns]
        matrix = np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.int64)
        blob, width = matrix.tobytes(), matrix.shape[1] * matrix.itemsize
        rows = np.empty(table.rows, dtype=np.int64)
        fresh: list[int] = []
        for row in range(table.rows):
            following = len(self._taken)
            known = self._taken.setdefault(blob[row * width : (row + 1) * width], following)
            if known == following:
                fresh.append(row)
            rows[row] = known
        for codes, target in zip(matrix[fresh].T, self._rows[schema.SNAPSHOT.name], strict=True):
            target.frombytes(np.ascontiguousarray(codes).tobytes())
        return rows


class _Numbers:
    """What the numbers of one part are in the joined recording."""

    def __init__(self, joiner: _Joiner, part: Recording) -> None:
        self._joiner = joiner
        self._part = part
        self._strings = np.array([joiner.string_code(text) for text in part.strings], np.int64)
        self._vectors: dict[tuple[int, bool], int] = {}
        self.snapshots = np.empty(0, dtype=np.int64)

    def of(self, column: schema.Column, codes: Int64Array) -> Int64Array:
        """The codes of a column in the numbering of the joined recording."""
        if column.type is _TYPES.STRING:
            return _mapped(codes, self._strings)
        if column.type is _TYPES.SNAPSHOT:
            return _mapped(codes, self.snapshots)
        if column.type in (_TYPES.VECTOR, _TYPES.STRINGS):
            used, where = np.unique(codes, return_inverse=True)
            texts = column.type is _TYPES.STRINGS
            renumbered = [self._vector_row(code, texts) for code in used.tolist()]
            return np.array(renumbered, dtype=np.int64)[where.reshape(-1)]
        return codes

    def _vector_row(self, code: int, texts: bool) -> int:
        """A vector of texts holds numbers of strings, and may look like one of integers."""
        if code <= HIGHEST_ABSENT_CODE:
            return code
        known = self._vectors.get((code, texts))
        if known is None:
            values = self._part.vector(code)
            if texts:
                values = [int(self._strings[value]) for value in values]
            known = self._vectors[code, texts] = self._joiner._vector(values)
        return known


def _mapped(codes: Int64Array, numbers: Int64Array) -> Int64Array:
    """Each code by its number; what is absent stays so."""
    present = codes > HIGHEST_ABSENT_CODE
    if not present.any():
        return codes
    return np.where(present, numbers[np.where(present, codes, 0)], codes)
