"""Schedules worked out on paper from the metadata kernel's rules.

A row of n tokens has ceil(n / 64) blocks, at least 1, and costs blocks + 5. What a part can take
is ceil(total cost / parts) + 5. A part that cannot finish a row takes (what is left - 5) blocks of
it, if that is more than 0, and stops. Every case below shows this arithmetic.

Rows are: begin row, end row, begin block, end block, begin split, first row cut, last row cut.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the kernel reference needs torch")

from padtrace.replay.kernels.reference.gpu import B200, H200, GpuModel
from padtrace.replay.kernels.reference.schedule import (
    dense_fp8_schedule,
    dense_fp8_sm_parts,
    dense_sm_parts,
    plan_sm_parts,
    sparse_implementation,
    sparse_lengths,
    tile_schedule,
)


def test_one_sequence_over_several_parts() -> None:
    # 640 tokens = 10 blocks, cost 15. 4 parts: ceil(15/4) + 5 = 4 + 5 = 9 each.
    # part 0: the row costs 10+5=15 > 9, takes 9-5=4 blocks: 0..4, the row is cut.
    # part 1: 6+5=11 > 9, takes 4: 4..8.
    # part 2: 2+5=7 <= 9, takes the rest 8..10. Three partial results.
    # part 3: nothing left. It begins at row 1 of 1; its end is that of the last row; its begin
    # block is read one past the kernel's array of first blocks, where the first row's last block
    # (9) lies.
    schedule = tile_schedule([640], 4)
    assert schedule.rows == (
        (0, 0, 0, 4, 0, 1, 1),
        (0, 0, 4, 8, 1, 1, 1),
        (0, 0, 8, 10, 2, 1, 1),
        (1, 0, 9, 10, 0, 0, 0),
    )
    assert schedule.num_splits == (0, 3)


def test_many_short_sequences() -> None:
    # 6 rows of 1 token: 1 block, cost 6 each, 36 together. 2 parts: 18 + 5 = 23 each.
    # part 0: 23-6=17, 17-6=11, 11-6=5: three rows; 5 < 6, and 5-5=0 blocks would be taken: stop.
    # part 1: the other three. No row is cut.
    schedule = tile_schedule([1] * 6, 2)
    assert schedule.rows == ((0, 2, 0, 1, 0, 0, 0), (3, 5, 0, 1, 0, 0, 0))
    assert schedule.num_splits == (0, 1, 2, 3, 4, 5, 6)


def test_lengths_of_zero() -> None:
    # blocks 1 (for the empty row), 3 (130 tokens), 1: cost 6 + 8 + 6 = 20. 2 parts: 10 + 5 = 15.
    # part 0: 15-6=9, 9-8=1; row 2 costs 6 > 1 and 1-5 < 0: stop. End: row 1, block 3.
    # part 1: row 2. An empty row ends at block 0, so that no block is visited.
    schedule = tile_schedule([0, 130, 0], 2)
    assert schedule.rows == ((0, 1, 0, 3, 0, 0, 0), (2, 2, 0, 0, 0, 0, 0))
    assert schedule.num_splits == (0, 1, 2, 3)


def test_more_parts_than_blocks() -> None:
    # 64 tokens = 1 block, cost 6. 4 parts: ceil(6/4) + 5 = 7 each. Part 0 takes all.
    # The others begin at row 1; the first row's last block is 0.
    schedule = tile_schedule([64], 4)
    assert schedule.rows == ((0, 0, 0, 1, 0, 0, 0),) + ((1, 0, 0, 1, 0, 0, 0),) * 3
    assert schedule.num_splits == (0, 1)


def test_one_cut_row_between_whole_ones() -> None:
    # blocks 2, 7, 1: cost 7 + 12 + 6 = 25. 3 parts: ceil(25/3) + 5 = 9 + 5 = 14.
    # part 0: 14-7=7; row 1 costs 12 > 7, 7-5=2 blocks of it: 0..2, last row cut.
    # part 1: row 1 has 5 left, 5+5=10 <= 14, leaves 4; row 2 costs 6 > 4 and 4-5 < 0: stop.
    # part 2: row 2. Splits: 1, 2, 1.
    schedule = tile_schedule([128, 448, 64], 3)
    assert schedule.rows == (
        (0, 1, 0, 2, 0, 0, 1),
        (1, 1, 2, 7, 1, 1, 1),
        (2, 2, 0, 1, 0, 0, 0),
    )
    assert schedule.num_splits == (0, 1, 3, 4)


def test_two_sparse_rows_of_128_heads_on_a_hopper_card() -> None:
    # 132 SMs, 1 q token, 128 heads: 132 / 1 / (128/64) = 66 parts.
    # top-k 2048 = 32 blocks, cost 37; two rows 74. ceil(74/66) + 5 = 2 + 5 = 7: 2 blocks a part.
    # 16 parts a row: part 15 begins at block 30, 2+5=7 <= 7, and has 0 left.
    # 34 parts without work: begin block is row 0's last block, 31.
    parts = plan_sm_parts(H200, s_q=1, h_q=128, h_k=1, sparse=True)
    assert parts == 66
    schedule = tile_schedule(sparse_lengths(2, 2048, extra_topk=-1), parts)
    assert schedule.num_splits == (0, 16, 32)
    assert schedule.rows[:16] == tuple((0, 0, 2 * i, 2 * i + 2, i, 1, 1) for i in range(16))
    assert schedule.rows[16:32] == tuple((1, 1, 2 * i, 2 * i + 2, i, 1, 1) for i in range(16))
    assert schedule.rows[32:] == ((2, 1, 31, 32, 0, 0, 0),) * 34


def test_a_part_that_ends_one_row_and_begins_the_next() -> None:
    # 256 and 256 tokens: 4 blocks, cost 9 each, 18 together. 2 parts of an overhead of 3 instead
    # (sm100, 128 heads, 512 values): cost 7 each, 14; ceil(14/2) + 3 = 10.
    # part 0: 10-7=3; row 1 costs 7 > 3, 3-3=0 blocks: stop. part 1: row 1.
    even = tile_schedule([256, 256], 2, fixed_overhead_num_blocks=3)
    assert even.rows == ((0, 0, 0, 4, 0, 0, 0), (1, 1, 0, 4, 0, 0, 0))
    # 192 and 320: 3 and 5 blocks, cost 6 + 8 = 14, the same 10 a part.
    # part 0: 10-6=4; row 1 costs 8 > 4, 4-3=1 block of it. part 1: 4+3=7 <= 10.
    uneven = tile_schedule([192, 320], 2, fixed_overhead_num_blocks=3)
    assert uneven.rows == ((0, 1, 0, 1, 0, 0, 1), (1, 1, 1, 5, 1, 1, 1))
    assert uneven.num_splits == (0, 1, 3)


def test_dense_fp8_counts_no_block_for_an_empty_row() -> None:
    # 0 and 100 tokens: 0 and 2 blocks, cost 5 + 7 = 12. 2 parts: 6 + 5 = 11.
    # part 0: 11-5=6; row 1 costs 7 > 6, 6-5=1 block: up to token 64. part 1: 1+5=6 <= 11.
    # Rows here: begin row, begin token, end row, end token, begin split.
    schedule = dense_fp8_schedule([0, 100], 2)
    assert schedule.rows == ((0, 0, 1, 64, 0), (1, 64, 1, 100, 1))
    assert schedule.num_splits == (0, 1, 3)


def test_a_batch_too_large_for_shared_memory_reads_nothing_past_an_array() -> None:
    # The kernel keeps 5 * b + 1 integers; 4 * (5 * 11623 + 1) = 232464 > 232448 = 227 KiB.
    # Rows of 65 tokens: 2 blocks, last block 1. One more part than rows: ceil(7b/(b+1)) + 5 = 12,
    # each part takes one row (12-7=5, and 5-5=0 of the next), so the last part is without work.
    for batch, begin_block in ((11622, 1), (11623, 0)):
        last = tile_schedule([65] * batch, batch + 1).rows[-1]
        assert last == (batch, batch - 1, begin_block, 2, 0, 0, 0)


def test_tokens_counted_for_a_sparse_row() -> None:
    assert sparse_lengths(2, 2048) == [2048, 2048]
    # The planning operator passes -1 for the extra cache: 2048 rounded to blocks, less 1.
    assert sparse_lengths(1, 2048, extra_topk=-1) == [2047]
    # Nothing to attend to counts as one token.
    assert sparse_lengths(3, 128, topk_length=[0, 1, 128]) == [1, 1, 128]
    # 65 tokens fill 128 places before the extra 10 begin.
    assert sparse_lengths(1, 128, topk_length=[65], extra_topk=64, extra_topk_length=[10]) == [138]


def test_number_of_parts() -> None:
    assert plan_sm_parts(H200, 1, 64, 1, sparse=True) == 132
    assert plan_sm_parts(H200, 4, 128, 1, sparse=True) == 132 // 4 // 2
    assert plan_sm_parts(H200, 200, 64, 1, sparse=True) == 1
    assert plan_sm_parts(B200, 1, 128, 1, sparse=True) == 148
    assert dense_sm_parts(H200, 1, 128, 1) == 66
    # 2 q tokens of 16 heads are 32 rows of one 64-row tile.
    assert dense_sm_parts(H200, 2, 16, 1) == 132
    assert dense_fp8_sm_parts(H200, 128, 1) == 66
    assert sparse_implementation(H200, 1, 128, 576) == ("sm90", 66, 5)
    assert sparse_implementation(B200, 1, 64, 576) == ("sm100-head64", 148, 5)
    assert sparse_implementation(B200, 1, 128, 576) == ("sm100-head64x2", 148, 5)
    assert sparse_implementation(B200, 1, 128, 512) == ("sm100-head128", 74, 3)


def test_the_card_decides_the_schedule() -> None:
    # 2048 tokens, 32 blocks, cost 37. 8 SMs: ceil(37/8) + 5 = 10, 5 blocks a part: 6 full ones
    # and 2 blocks. 78 SMs: 1 + 5 = 6, one block a part: 32.
    few = GpuModel("8 SMs", 9, 0, 8)
    assert tile_schedule([2048], plan_sm_parts(few, 1, 64, 1, True)).num_splits == (0, 7)
    assert tile_schedule([2048], 78).num_splits == (0, 32)
