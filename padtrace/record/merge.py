"""Puts the events of many rings into one Recording, whole columns at a time.

Every process numbers its own strings; here strings, vectors and snapshots get one numbering for
the whole recording, equal ones stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from padtrace.record import wire
from padtrace.record.ring_reader import EventBlock, Ring
from padtrace.recording import schema
from padtrace.recording.absent import HIGHEST_ABSENT_CODE, NOT_OBSERVED_CODE
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.columns import Int64Array
from padtrace.recording.model import Value

LOST_STRING = "<string lost>"
_STRING, _STRINGS = schema.ColumnType.STRING, schema.ColumnType.STRINGS


class RingBuilder(RecordingBuilder):
    """A RecordingBuilder that takes all events of a process at once, and only so."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        super().__init__(about)
        self._taken: dict[bytes, int] = {}

    def add_ring(
        self, values: Mapping[str, Value], facts: Mapping[str, Any], ring: Ring, shift_ns: int = 0
    ) -> int:
        """Add one process with its events; returns its row.

        Args:
            shift_ns: added to the time of each event, to align clocks.
        """
        process = self.add_process(values, facts)
        strings = self._string_numbers(ring)
        snapshots = self._snapshots_of(ring, strings)
        for kind, block in ring.events.items():
            names = wire.layout(kind)
            order = np.argsort(block.scalars[:, names.index("enter_seq")], kind="stable")
            scalars = self._numbered(kind, block, strings)[order]
            for position in wire.references(kind):
                column = scalars[:, position]
                taken = column != NOT_OBSERVED_CODE
                column[taken] = snapshots[column[taken]]
            scalars[:, names.index("process")] = process
            times = scalars[:, names.index("t_ns")]
            times[times > HIGHEST_ABSENT_CODE] += shift_ns
            for column, target in zip(scalars.T, self._rows[kind], strict=True):
                target.frombytes(np.ascontiguousarray(column).tobytes())
        return process

    def _string_numbers(self, ring: Ring) -> Int64Array:
        """Numbers in the recording by string id of the process; the last is for lost strings."""
        highest = max(ring.strings, default=-1)
        missing = [number for number in range(highest + 1) if number not in ring.strings]
        lost = self._code(_STRING, LOST_STRING) if missing or ring.damaged else -1
        numbers = np.full(highest + 2, lost, dtype=np.int64)
        for number, text in ring.strings.items():
            numbers[number] = self._code(_STRING, text)
        return numbers

    def _numbered(self, kind: str, block: EventBlock, strings: Int64Array) -> Int64Array:
        """The scalars with strings and vectors in the numbering of the recording."""
        scalars = block.scalars.copy()
        fields = wire.fields(kind)
        for position, field in enumerate(fields):
            if field.type is _STRING:
                scalars[:, position] = self._renumber(scalars[:, position], strings)
        starts = block.starts[:-1].copy()
        for position in wire.ragged(kind):
            lengths = block.scalars[:, position]
            texts = strings if fields[position].type is _STRINGS else None
            scalars[:, position] = self._vectors_of(block.values, starts, lengths, texts)
            starts += np.maximum(lengths, 0)
        return scalars

    def _renumber(self, codes: Int64Array, strings: Int64Array) -> Int64Array:
        present = codes > HIGHEST_ABSENT_CODE
        known = present & (codes >= 0) & (codes < len(strings))
        renumbered = np.where(known, strings[np.where(known, codes, len(strings) - 1)], -1)
        if bool((present & (renumbered < 0)).any()):
            renumbered[renumbered < 0] = self._code(_STRING, LOST_STRING)
        return np.where(present, renumbered, codes)

    def _vectors_of(
        self, values: Int64Array, starts: Int64Array, lengths: Int64Array, texts: Int64Array | None
    ) -> Int64Array:
        """Rows of the table `vector`; an absent code stays as it is."""
        result = lengths.copy()
        if texts is not None:
            values = self._renumber(values, texts)
        blob = np.ascontiguousarray(values).tobytes()
        known: dict[bytes, int] = {}
        rows = np.flatnonzero(lengths >= 0)
        spans = zip(rows.tolist(), starts[rows].tolist(), lengths[rows].tolist(), strict=True)
        for row, start, length in spans:
            part = blob[start * wire.WORD : (start + length) * wire.WORD]
            number = known.get(part)
            if number is None:
                key = tuple(np.frombuffer(part, "<i8").tolist())
                number = known[part] = self._vectors.setdefault(key, len(self._vectors))
            result[row] = number
        return result

    def _snapshots_of(self, ring: Ring, strings: Int64Array) -> Int64Array:
        """Rows of the table `snapshot`, for each snapshot of a ring."""
        if ring.snapshots is None:
            return np.empty(0, dtype=np.int64)
        matrix = np.ascontiguousarray(self._numbered(wire.SNAPSHOT, ring.snapshots, strings))
        rows = np.empty(len(matrix), dtype=np.int64)
        blob, width = matrix.tobytes(), matrix.shape[1] * wire.WORD
        fresh: list[int] = []
        for index in range(len(matrix)):
            known = len(self._taken)
            number = self._taken.setdefault(blob[index * width : (index + 1) * width], known)
            if number == known:
                fresh.append(index)
            rows[index] = number
        for column, target in zip(matrix[fresh].T, self._rows["snapshot"], strict=True):
            target.frombytes(np.ascontiguousarray(column).tobytes())
        return rows
