"""The real FlashMLA kernels against the reference; needs a CUDA device and one of the wheels."""

# ruff: noqa: E402 - the skip comes before the imports that need torch

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from padtrace.replay.kernels.compare import (
    Comparison,
    compare_outputs,
    compare_refusals,
    compare_schedules,
    reference_like,
)
from padtrace.replay.kernels.interface import FlashMlaKernel
from padtrace.replay.kernels.launch import run_launch
from padtrace.replay.kernels.launch_shapes import LaunchShapes
from padtrace.replay.kernels.select import cuda_candidates

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[0, 1], ids=["flash_mla", "sgl_kernel"])
def kernel(request: pytest.FixtureRequest) -> FlashMlaKernel:
    candidate = cuda_candidates()[request.param]
    found = candidate.availability()
    if not found.usable:
        pytest.skip(f"{candidate.name}: {found.reason}")
    return candidate


def differing(rows: object) -> list[Comparison]:
    return [row for row in rows if not row.agrees]


def test_schedules_are_the_same_integers(kernel: FlashMlaKernel) -> None:
    assert differing(compare_schedules(kernel, reference_like(kernel))) == []


def test_refusals_are_the_same_words(kernel: FlashMlaKernel) -> None:
    assert differing(compare_refusals(kernel, reference_like(kernel))) == []


def test_outputs_are_within_bfloat16(kernel: FlashMlaKernel) -> None:
    assert differing(compare_outputs(kernel, reference_like(kernel))) == []


def test_a_recorded_launch_ends_the_same_way(kernel: FlashMlaKernel) -> None:
    for rows in (5, 7, 9):
        launch = LaunchShapes((6, 1, 64, 576), num_splits_rows=rows, indices_shape=(6, 1, 2048))
        real = run_launch(kernel, launch, seed=rows)
        ours = run_launch(reference_like(kernel), launch, seed=rows)
        assert (real.outcome, real.error) == (ours.outcome, ours.error)
        assert real.num_splits == ours.num_splits
