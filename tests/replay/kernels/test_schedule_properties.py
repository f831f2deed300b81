"""What must hold for every schedule."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the kernel reference needs torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from padtrace.replay.kernels.reference.schedule import dense_fp8_schedule, tile_schedule

LENGTHS = st.lists(st.integers(0, 6000), min_size=1, max_size=60)
PARTS = st.integers(1, 160)


def ceil_div(value: int, by: int) -> int:
    return (value + by - 1) // by


@settings(max_examples=150, deadline=None)
@given(LENGTHS, PARTS, st.sampled_from([3, 5]))
def test_every_block_once_and_splits_counted(lengths: list[int], parts: int, overhead: int) -> None:
    schedule = tile_schedule(lengths, parts, fixed_overhead_num_blocks=overhead)
    assert len(schedule.rows) == parts
    visited: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    partial: list[int] = []
    for begin, end, begin_block, end_block, begin_split, first_cut, last_cut in schedule.rows:
        if begin >= len(lengths):
            continue
        for row in range(begin, end + 1):
            start = begin_block if row == begin else 0
            stop = end_block if row == end else ceil_div(lengths[row], 64)
            visited[row].extend(range(start, stop))
            cut = first_cut if row == begin else (last_cut if row == end else 0)
            pieces = schedule.num_splits[row + 1] - schedule.num_splits[row]
            assert bool(cut) == (pieces > 1)
            if cut:
                partial.append(schedule.num_splits[row] + (begin_split if row == begin else 0))
            else:
                partial.append(schedule.num_splits[row])
    for row, length in enumerate(lengths):
        assert visited[row] == list(range(ceil_div(length, 64)))
    # Each partial result is written by exactly one piece, in order, and the last entry of
    # num_splits is their number.
    assert partial == list(range(schedule.num_splits[-1]))
    assert schedule.num_splits[0] == 0
    assert all(a < b for a, b in zip(schedule.num_splits, schedule.num_splits[1:], strict=False))
    # The accumulation buffers have room for b + parts results.
    assert schedule.num_splits[-1] <= len(lengths) + parts


@settings(max_examples=100, deadline=None)
@given(LENGTHS, PARTS)
def test_dense_fp8_every_block_once(lengths: list[int], parts: int) -> None:
    schedule = dense_fp8_schedule(lengths, parts)
    visited: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    for begin, begin_token, end, end_token, _ in schedule.rows:
        if begin >= len(lengths):
            continue
        for row in range(begin, end + 1):
            start = begin_token // 64 if row == begin else 0
            stop = ceil_div(end_token, 64) if row == end else ceil_div(lengths[row], 64)
            visited[row].extend(range(start, stop))
    for row, length in enumerate(lengths):
        assert visited[row] == list(range(ceil_div(length, 64)))
    assert schedule.num_splits[0] == 0
    assert all(a < b for a, b in zip(schedule.num_splits, schedule.num_splits[1:], strict=False))
