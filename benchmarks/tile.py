"""Makes a long recording out of a short one: the same step again and again, on every rank."""

from __future__ import annotations

import numpy as np

from padtrace.recording import schema
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.columns import Int64Array
from padtrace.recording.model import Recording, TableData, columns_from

# Columns that go on counting from one repetition to the next.
_COUNTERS = ("batch", "forward", "step", "enter_seq", "exit_seq", "parent", "t_ns")
_STEP_NS = 25_000_000


def tile(recording: Recording, times: int) -> Recording:
    """`times` repetitions of every event of `recording`, in the order of a long run."""
    strides = {name: _stride(recording, name) for name in _COUNTERS}
    tables = dict(recording.tables)
    for kind in schema.EVENT_KINDS:
        data = recording.table(kind)
        order = _order(data.column("process"), times)
        repetition = np.tile(np.arange(times), data.rows)
        arrays: dict[str, Int64Array] = {}
        for column in schema.event_columns(kind):
            values = data.column(column.name)[order]
            if column.name in strides:
                moved = values + repetition * strides[column.name]
                values = np.where(values > HIGHEST_ABSENT_CODE, moved, values)
            arrays[column.name] = values
        sequence = np.lexsort((arrays["enter_seq"], arrays["process"]))
        arrays = {name: values[sequence] for name, values in arrays.items()}
        tables[kind] = TableData(kind, data.rows * times, columns_from(arrays))
    return Recording(
        tables=tables,
        strings=recording.strings,
        vector_values=recording.vector_values,
        vector_offsets=recording.vector_offsets,
        facts=recording.facts,
        coverage=recording.coverage,
        about=recording.about,
    )


def _order(processes: Int64Array, times: int) -> Int64Array:
    """Row indices in which every row stands `times` times."""
    return np.repeat(np.arange(processes.size, dtype=np.int64), times)


def _stride(recording: Recording, name: str) -> int:
    """By how much a counter grows in one repetition: past the largest value there is."""
    if name == "t_ns":
        return _STEP_NS
    in_sequence = name in ("enter_seq", "exit_seq", "parent")
    names = ("enter_seq", "exit_seq") if in_sequence else (name,)
    highest = 0
    for kind in schema.EVENT_KINDS:
        for column in names:
            values = recording.table(kind).column(column)
            present = values[values > HIGHEST_ABSENT_CODE]
            highest = max(highest, int(present.max()) if present.size else 0)
    return highest + 1
