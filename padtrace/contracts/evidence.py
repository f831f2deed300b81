"""The columns of a Recording as contracts ask for them, and which event belongs to which.

Everything is vectorised: a check of ten thousand steps on 32 ranks reads millions of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padtrace.contracts.model import BoolArray
from padtrace.recording import about, coverage
from padtrace.recording.about import About
from padtrace.recording.absent import HIGHEST_ABSENT_CODE, NONE_CODE, NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array
from padtrace.recording.coverage import Coverage
from padtrace.recording.facts import Facts, view
from padtrace.recording.model import Recording

NO_ROW = -1
_Result = TypeVar("_Result")


def present(values: Int64Array) -> BoolArray:
    """Where a column holds a real number."""
    return values > HIGHEST_ABSENT_CODE


def pack(columns: list[Int64Array]) -> Int64Array:
    """One int64 per row that orders rows as the columns do, the first being most significant."""
    packed = np.zeros(columns[0].shape, dtype=np.int64)
    span = 1
    for column in columns:
        low = int(column.min()) if column.size else 0
        width = int(column.max()) - low + 1 if column.size else 1
        shifted = column - low if low > HIGHEST_ABSENT_CODE and width < 2**40 else None
        if shifted is None or span * width >= 2**62:
            _, shifted = np.unique(column, return_inverse=True)
            shifted = shifted.astype(np.int64)
            width = int(shifted.max()) + 1 if shifted.size else 1
        if span * width >= 2**62:
            _, ranks = np.unique(packed, return_inverse=True)
            packed = ranks.astype(np.int64)
            span = int(packed.max()) + 1 if packed.size else 1
        packed = packed * width + shifted
        span *= width
    return packed


class Evidence:
    """Columns, snapshots and pairings of one recording, each worked out once."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._strings = {text: index for index, text in enumerate(recording.strings)}
        self._facts: dict[int, Facts] = {}
        self._once: dict[str, Any] = {}

    def once(self, name: str, work_out: Callable[[Evidence], _Result]) -> _Result:
        """What several contracts need, worked out by the first of them."""
        if name not in self._once:
            self._once[name] = work_out(self)
        result: _Result = self._once[name]
        return result

    def count(self, kind: str) -> int:
        return self.recording.rows(kind)

    def column(self, kind: str, name: str) -> Int64Array:
        return self.recording.table(kind).column(name)

    def at(self, kind: str, name: str, rows: Int64Array) -> Int64Array:
        """A column at some rows; "not observed" where the row is -1."""
        values = self.column(kind, name)
        if not values.size:
            return np.full(rows.shape, NOT_OBSERVED_CODE, dtype=np.int64)
        return np.where(rows >= 0, values[np.maximum(rows, 0)], NOT_OBSERVED_CODE)

    def snapshot(
        self, kind: str, which: str, name: str, rows: Int64Array | None = None
    ) -> Int64Array:
        """A column of the snapshot `which` ("entry" or "exit") of events."""
        index = self.column(kind, which) if rows is None else self.at(kind, which, rows)
        values = self.column("snapshot", name)
        if not values.size:
            return np.full(index.shape, NOT_OBSERVED_CODE, dtype=np.int64)
        known = present(index)
        return np.where(known, values[np.where(known, index, 0)], NOT_OBSERVED_CODE)

    def text_id(self, text: str) -> int:
        """String id, or a number no column holds."""
        return self._strings.get(text, -1)

    def text_ids(self, texts: tuple[str, ...]) -> Int64Array:
        return np.array([self.text_id(text) for text in texts], dtype=np.int64)

    def is_text(self, values: Int64Array, *texts: str) -> BoolArray:
        ids = self.text_ids(texts)
        # A text that no column holds is not the same as a value that is not known.
        return np.isin(values, ids[ids >= 0])

    def text(self, code: int) -> str | None:
        return self.recording.strings[code] if code > HIGHEST_ABSENT_CODE else None

    @cached_property
    def about(self) -> About:
        return about.view(self.recording.about)

    @cached_property
    def coverage(self) -> Coverage:
        return coverage.view(self.recording.coverage)

    def facts(self, process: int) -> Facts:
        if process not in self._facts:
            self._facts[process] = view(self.recording.facts[process])
        return self._facts[process]

    def release(self, process: int) -> str | None:
        """The release whose code made the values of a process, as far as it is known."""
        stated = self.facts(process).sglang.version or self.about.sglang
        return stated if isinstance(stated, str) else None

    # Vectors

    def vector_lengths(self, index: Int64Array) -> Int64Array:
        """Length of the vectors a column refers to; absent codes stay."""
        return self._per_vector(index, np.diff(self.recording.vector_offsets))

    def vector_items(self, index: Int64Array, position: int) -> Int64Array:
        """One item of the vectors a column refers to, "not observed" where too short."""
        offsets = self.recording.vector_offsets
        long_enough = np.diff(offsets) > position
        values = np.full(long_enough.shape, NOT_OBSERVED_CODE, dtype=np.int64)
        values[long_enough] = self.recording.vector_values[offsets[:-1][long_enough] + position]
        return self._per_vector(index, values)

    def vector_sums(self, index: Int64Array) -> Int64Array:
        offsets = self.recording.vector_offsets
        totals = np.concatenate([[0], np.cumsum(self.recording.vector_values)])
        return self._per_vector(index, totals[offsets[1:]] - totals[offsets[:-1]])

    def vector_minima(self, index: Int64Array) -> Int64Array:
        """Smallest item of the vectors a column refers to, "not observed" where empty."""
        return self._extremes(index, np.minimum)

    def vector_maxima(self, index: Int64Array) -> Int64Array:
        """Largest item of the vectors a column refers to, "not observed" where empty."""
        return self._extremes(index, np.maximum)

    def _extremes(self, index: Int64Array, which: np.ufunc) -> Int64Array:
        starts = self.recording.vector_offsets[:-1]
        filled = np.diff(self.recording.vector_offsets) > 0
        values = np.full(starts.shape, NOT_OBSERVED_CODE, dtype=np.int64)
        if filled.any():
            values[filled] = which.reduceat(self.recording.vector_values, starts[filled])
        return self._per_vector(index, values)

    def _per_vector(self, index: Int64Array, values: Int64Array) -> Int64Array:
        known = present(index)
        if not values.size:
            return np.where(known, NOT_OBSERVED_CODE, index)
        return np.where(known, values[np.where(known, index, 0)], index)

    # Which event belongs to which

    def last_before(
        self,
        earlier: tuple[list[Int64Array], Int64Array],
        later: tuple[list[Int64Array], Int64Array],
    ) -> Int64Array:
        """For each later event the index of the last earlier one with the same keys, or -1.

        Each side is (key columns, order numbers); "before" is a smaller order number.
        """
        return self._neighbour(earlier, later, after=False)

    def first_after(
        self,
        candidates: tuple[list[Int64Array], Int64Array],
        origins: tuple[list[Int64Array], Int64Array],
    ) -> Int64Array:
        """For each origin the index of the first candidate after it with the same keys, or -1."""
        return self._neighbour(candidates, origins, after=True)

    @staticmethod
    def _neighbour(
        found: tuple[list[Int64Array], Int64Array],
        origin: tuple[list[Int64Array], Int64Array],
        *,
        after: bool,
    ) -> Int64Array:
        size = found[1].size
        if not size or not origin[1].size:
            return np.full(origin[1].shape, NO_ROW, dtype=np.int64)
        keys = [np.concatenate(pair) for pair in zip(found[0], origin[0], strict=True)]
        key = pack(keys)
        both = pack([key, np.concatenate([found[1], origin[1]])])
        order = np.argsort(both[:size], kind="stable")
        ordered = both[:size][order]
        if after:
            position = np.searchsorted(ordered, both[size:], side="right")
        else:
            position = np.searchsorted(ordered, both[size:], side="left") - 1
        inside = (position >= 0) & (position < size)
        candidate = order[np.where(inside, position, 0)]
        same = inside & (key[:size][candidate] == key[size:])
        return np.where(same, candidate, NO_ROW).astype(np.int64)

    @cached_property
    def top_pads(self) -> Int64Array:
        """Rows of the pads that are not inside another pad."""
        process = self.column("pad", "process")
        inside = pack(
            [
                np.concatenate([process, process]),
                np.concatenate([self.column("pad", "enter_seq"), self.column("pad", "parent")]),
            ]
        )
        nested = np.isin(inside[process.size :], inside[: process.size])
        return np.flatnonzero(~nested).astype(np.int64)

    @cached_property
    def split_plans(self) -> Int64Array:
        """Rows of the plans that made a num_splits vector."""
        return np.flatnonzero(present(self.column("plan", "num_splits.rows"))).astype(np.int64)

    def keys(self, kind: str, rows: Int64Array, *names: str) -> list[Int64Array]:
        return [self.column(kind, name)[rows] for name in names]

    def plan_before(
        self, kind: str, rows: Int64Array, bound: Int64Array, plans: Int64Array
    ) -> Int64Array:
        """The plan each event works with: the last one of its batch and draft step.

        Args:
            kind, rows: the events.
            bound: the plan must have entered before this order number.
            plans: rows of the plans that are candidates.

        Returns:
            rows of the table `plan`, -1 where there is none. A plan of the same draft step wins;
            where steps were not recorded, the last plan of the batch does.
        """
        order = self.column("plan", "enter_seq")[plans]
        found = np.full(rows.shape, NO_ROW, dtype=np.int64)
        for names in (("process", "batch", "draft_step"), ("process", "batch")):
            index = self.last_before(
                (self.keys("plan", plans, *names), order), (self.keys(kind, rows, *names), bound)
            )
            chosen = np.where(index >= 0, plans[np.maximum(index, 0)] if plans.size else -1, NO_ROW)
            found = np.where(found >= 0, found, chosen)
        return found

    def is_none(self, values: Int64Array) -> BoolArray:
        return np.asarray(values == NONE_CODE)
