"""One recorded launch at a time: what comes back, and that nothing else can."""

# ruff: noqa: E402 - the skip comes before the imports that need torch

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch", reason="the kernel reference needs torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from padtrace.errors import BadRecordingError
from padtrace.replay.kernels.interface import Availability, DecodeRequest, Plan, PlanRequest
from padtrace.replay.kernels.launch import LaunchResult, run_launch
from padtrace.replay.kernels.launch_shapes import LaunchLimits, LaunchShapes
from padtrace.replay.kernels.reference.kernel import ReferenceKernel


def dsa_launch(q_rows: int, num_splits_rows: int, topk: int = 128) -> LaunchShapes:
    """A launch as SGLang's DSA backend makes it, 16 heads padded to 64."""
    return LaunchShapes(
        q_shape=(q_rows, 1, 64, 576),
        num_splits_rows=num_splits_rows,
        cache_seqlens_rows=max(num_splits_rows - 1, 0),
        indices_shape=(q_rows, 1, topk),
        block_table_shape=(q_rows, 0),
    )


def test_pull_request_34443_on_the_release_with_the_fault_and_the_one_without() -> None:
    # The rows are in the report: 6 rows of q against num_splits of 9 in 0.5.17, of 7 in 0.5.18.
    faulty = run_launch(ReferenceKernel(), dsa_launch(6, 9))
    assert (faulty.outcome, faulty.stage) == ("refused", "decode")
    assert faulty.error == "num_splits must have shape (b+1)"
    assert (faulty.q_rows, faulty.num_splits_rows, faulty.num_splits_expected) == (6, 9, 7)
    assert faulty.num_splits is not None
    assert len(faulty.num_splits) == 9
    mended = run_launch(ReferenceKernel(), dsa_launch(6, 7))
    assert (mended.outcome, mended.error, mended.hazards) == ("pass", None, ())
    # 128 tokens are 2 blocks and 6 rows on 132 parts take one block a part.
    assert mended.num_splits == (0, 2, 4, 6, 8, 10, 12)
    assert mended.out is not None
    assert mended.out.shape == (6, 1, 64, 512)


@pytest.mark.parametrize("rows", [0, 1, 2, 6, 8])
def test_any_other_length_is_refused(rows: int) -> None:
    result = run_launch(ReferenceKernel(), dsa_launch(6, rows))
    assert result.error == "num_splits must have shape (b+1)"
    assert result.num_splits_rows == rows
    assert result.num_splits is not None
    assert len(result.num_splits) == rows


def test_the_same_seed_gives_the_same_values() -> None:
    one, same, other = (
        run_launch(ReferenceKernel(), dsa_launch(2, 3), seed=seed) for seed in (7, 7, 8)
    )
    assert one.out is not None
    assert same.out is not None
    assert other.out is not None
    assert torch.equal(one.out, same.out)
    assert not torch.equal(one.out, other.out)


def test_recorded_num_splits_are_used_as_they_are() -> None:
    launch = LaunchShapes((2, 1, 64, 576), num_splits=(0, 0, 0), indices_shape=(2, 1, 128))
    result = run_launch(ReferenceKernel(), launch)
    assert result.outcome == "undefined"
    assert result.num_splits == (0, 0, 0)
    assert "num_splits gives it no partial result" in result.hazards[0]


def test_dense_launches() -> None:
    shapes = {"q_shape": (3, 1, 16, 576), "block_table_shape": (3, 4), "cache_seqlens": (3, 0, 200)}
    assert run_launch(ReferenceKernel(), LaunchShapes(num_splits_rows=4, **shapes)).computed
    wrong = run_launch(ReferenceKernel(), LaunchShapes(num_splits_rows=5, **shapes))
    assert wrong.error == "num_splits must have shape (batch_size+1)"
    fp8 = LaunchShapes(num_splits_rows=4, q_dtype="float8_e4m3fn", **shapes)
    assert run_launch(ReferenceKernel(), fp8).outcome == "pass"
    unplanned = run_launch(ReferenceKernel(), LaunchShapes(**shapes))
    assert (unplanned.outcome, unplanned.num_splits_rows) == ("pass", None)


def test_a_large_launch_is_judged_by_its_shapes() -> None:
    started = time.monotonic()
    right = run_launch(ReferenceKernel(), dsa_launch(8192, 8193, topk=2048))
    wrong = run_launch(ReferenceKernel(), dsa_launch(8192, 8194, topk=2048))
    assert time.monotonic() - started < 5
    assert (right.outcome, right.computed, right.out) == ("pass", False, None)
    assert wrong.error == "num_splits must have shape (b+1)"


class Unruly:
    """A kernel that fails in ways no kernel should."""

    name = "unruly"
    device = torch.device("cpu")

    def __init__(self, error: Exception) -> None:
        self.error = error

    def availability(self) -> Availability:
        return Availability(True, "")

    def get_mla_metadata(self, request: PlanRequest) -> Plan:
        raise self.error

    def flash_mla_with_kvcache(self, request: DecodeRequest) -> None:
        raise AssertionError("not reached: the plan fails first")


@pytest.mark.parametrize(
    "error", [ValueError("odd"), KeyError("k"), RuntimeError(""), MemoryError(), RecursionError()]
)
def test_whatever_a_kernel_raises_stays_inside(error: Exception) -> None:
    result = run_launch(Unruly(error), dsa_launch(2, 3))
    assert (result.outcome, result.stage) == ("refused", "plan")
    assert result.error


def test_a_real_kernel_is_not_given_what_would_end_the_process() -> None:
    for launch in (
        LaunchShapes((2, 1, 16, 512), block_table_shape=(2, 1)),
        LaunchShapes((2, 1, 0, 576), block_table_shape=(2, 1)),
        LaunchShapes((2, 1, 16, 576), block_table_shape=(2, 1), num_heads_k=0),
    ):
        assert run_launch(Unruly(ValueError("called")), launch).outcome == "not-called"
    small = LaunchLimits(max_bytes=1000)
    result = run_launch(Unruly(ValueError("called")), dsa_launch(2, 3), limits=small)
    assert result.outcome == "not-called"
    assert "the bound is 1000" in (result.error or "")


@pytest.mark.parametrize(
    "launch",
    [
        LaunchShapes((2**40, 1, 64, 576), indices_shape=(1, 1, 64)),
        LaunchShapes((-1, 1, 64, 576), indices_shape=(1, 1, 64)),
        LaunchShapes((1,) * 40),
        LaunchShapes((4, 1, 2**30, 2**30), indices_shape=(4, 1, 64)),
        LaunchShapes((4, 1, 64, 576), indices_shape=(4, 2**31 - 1, 2**31 - 1)),
        LaunchShapes((4, 1, 64, 576), num_splits_rows=2**31),
        LaunchShapes((4, 1, 64, 576), num_splits=(0, 2**31)),
        LaunchShapes((4, 1, 64, 576), page_size=-64),
        LaunchShapes((4, 1, 64, 576), bytes_per_token=2**30),
        LaunchShapes((4, 1, 64, 576), q_dtype="os.system"),
        LaunchShapes((4, 1, 64, 576), q_dtype="complex32"),
        LaunchShapes((4, 1, 64, 57.6)),
        LaunchShapes((4, 1, 64, True)),
    ],
)
def test_hostile_numbers_are_a_bad_recording(launch: LaunchShapes) -> None:
    with pytest.raises(BadRecordingError) as refused:
        run_launch(ReferenceKernel(), launch)
    assert refused.value.exit_code == 3
    assert len(refused.value.lines()) == 3


NUMBERS = st.one_of(st.integers(0, 70), st.sampled_from([64, 128, 512, 576, 2**20, 2**31 - 1]))
SHAPES = st.lists(NUMBERS, max_size=5)


@settings(max_examples=120, deadline=None)
@given(
    st.builds(
        LaunchShapes,
        q_shape=SHAPES,
        num_splits_rows=st.none() | st.integers(0, 40),
        num_splits=st.none() | st.lists(st.integers(-3, 50), max_size=8),
        cache_seqlens=st.none() | st.lists(st.integers(-5, 500), max_size=8),
        indices_shape=st.none() | SHAPES,
        block_table_shape=st.none() | SHAPES,
        page_size=st.sampled_from([0, 1, 64]),
        head_dim_v=st.sampled_from([0, 512, 576]),
        num_heads_k=st.integers(0, 3),
        bytes_per_token=st.none() | st.sampled_from([0, 1, 528, 584, 656]),
        q_dtype=st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "int64"]),
        causal=st.booleans(),
        is_fp8_kvcache=st.none() | st.booleans(),
        topk_length=st.none() | st.lists(st.integers(-3, 200), max_size=4),
    )
)
def test_no_numbers_crash_it(launch: LaunchShapes) -> None:
    small = LaunchLimits(max_bytes=1 << 24, max_work=20_000_000)
    try:
        result = run_launch(ReferenceKernel(), launch, limits=small)
    except BadRecordingError:
        return
    assert isinstance(result, LaunchResult)
    assert (result.error is None) == (result.outcome in ("pass", "undefined"))


def test_recorded_tensors_take_the_place_of_random_ones() -> None:
    zeros = torch.full((2, 1, 128), -1, dtype=torch.int32)
    result = run_launch(ReferenceKernel(), dsa_launch(2, 3), recorded={"indices": zeros})
    assert result.lse is not None
    assert bool((result.lse == torch.inf).all())
    with pytest.raises(BadRecordingError, match="softmax"):
        run_launch(ReferenceKernel(), dsa_launch(2, 3), recorded={"softmax": zeros})
