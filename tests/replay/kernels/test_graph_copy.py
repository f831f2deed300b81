"""Slices of and copies into a captured plan: the loud case, and the three silent ones."""

# ruff: noqa: E402 - the skip comes before the imports that need torch

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the kernel reference needs torch")

from padtrace.replay.kernels.graph_copy import CopyCase, PlainGraphMetadata, copy_into_graph
from padtrace.replay.kernels.interface import PlanRequest
from padtrace.replay.kernels.reference.kernel import ReferenceKernel


def plan_of(rows: int, topk: int = 128) -> PlainGraphMetadata:
    lengths = torch.ones(rows, dtype=torch.int32)
    plan = ReferenceKernel().get_mla_metadata(PlanRequest(lengths, 64, 1, 64, True, topk))
    return PlainGraphMetadata.of(plan)


def numbered(*values: int) -> PlainGraphMetadata:
    return PlainGraphMetadata(
        torch.zeros(132, 8, dtype=torch.int32), torch.tensor(values, dtype=torch.int32)
    )


def test_a_plan_of_the_captured_rows() -> None:
    captured, fresh = plan_of(8, topk=64), plan_of(8, topk=128)
    result = copy_into_graph(captured, 8, 8, fresh)
    assert (result.case, result.silent, result.error) == (CopyCase.EQUAL, False, None)
    assert result.num_splits == (0, 2, 4, 6, 8, 10, 12, 14, 16)


def test_a_buffer_longer_than_the_captured_launch_is_no_stale_tail() -> None:
    result = copy_into_graph(plan_of(32), 8, 8, plan_of(8))
    assert result.case is CopyCase.EQUAL


def test_one_entry_is_broadcast_over_the_slice() -> None:
    # anchors of the survey: a source of length 1 makes every row its one value.
    captured = plan_of(8)
    result = copy_into_graph(captured, 8, 8, numbered(5))
    assert (result.case, result.silent) == (CopyCase.BROADCAST, True)
    assert result.num_splits == (5,) * 9
    assert (result.slice_length, result.source_length) == (9, 1)


def test_five_entries_into_nine_are_refused_in_torchs_words() -> None:
    result = copy_into_graph(plan_of(8), 8, 8, numbered(0, 1, 2, 3, 4))
    assert (result.case, result.silent) == (CopyCase.REFUSED, False)
    assert result.error is not None
    assert "9" in result.error
    assert "5" in result.error


def test_a_slice_past_the_end_is_clamped() -> None:
    # 12 rows want 13 entries of a buffer of 9; Python gives 9 without a word.
    silent = copy_into_graph(plan_of(8), 8, 12, plan_of(8))
    assert (silent.case, silent.silent, silent.clamped) == (CopyCase.CLAMPED_SLICE, True, True)
    assert (silent.wanted_length, silent.slice_length) == (13, 9)
    # With the plan that belongs to 12 rows the copy itself stops it.
    loud = copy_into_graph(plan_of(8), 8, 12, plan_of(12))
    assert (loud.case, loud.silent, loud.clamped) == (CopyCase.REFUSED, False, True)


def test_fewer_rows_than_captured_leave_the_tail_of_the_older_plan() -> None:
    captured = numbered(0, 10, 20, 30, 40)
    result = copy_into_graph(captured, 4, 2, numbered(0, 1, 2))
    assert (result.case, result.silent) == (CopyCase.STALE_TAIL, True)
    assert result.num_splits == (0, 1, 2, 30, 40)
