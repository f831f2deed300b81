"""Sizes and host values of real tensors: each number is the one Python's own arithmetic gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padtrace.record.snapshots import SnapshotTaker
from padtrace.recording import schema
from padtrace.recording.absent import NOT_OBSERVED_CODE
from tests.record.standins import ForwardBatch, Recorder, decode_batch
from tests.record.test_probe_launch import Kernel

torch = pytest.importorskip("torch", reason="torch is not installed here")

COLUMNS = [column.name for column in schema.SNAPSHOT.columns]
LENGTHS = [COLUMNS.index("seq_lens_cpu.max"), COLUMNS.index("seq_lens_cpu.sum")]
ROWS = COLUMNS.index("seq_lens.rows")


def taken(**changes: Any) -> list[int]:
    taker = SnapshotTaker(ForwardBatch, lambda text: 0, lambda: 0)
    return list(taker.take(decode_batch(**changes)).scalars)


def lengths(mirror: Any) -> tuple[int, int]:
    scalars = taken(seq_lens_cpu=mirror)
    return scalars[LENGTHS[0]], scalars[LENGTHS[1]]


def test_torch_here_describes_tensors_by_dlpack() -> None:
    """Else the tests below would only see the slow way."""
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200),
    st.sampled_from([torch.int64, torch.int32]),
    st.integers(0, 3),
    st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_largest_and_sum_of_any_view(values: list[int], dtype: Any, start: int, step: int) -> None:
    start = min(start, len(values) - 1)
    seen = values[start::step]
    mirror = torch.tensor(values, dtype=dtype)[start::step]
    assert mirror.shape[0] == len(seen)
    assert lengths(mirror) == (max(seen), sum(seen))


@pytest.mark.parametrize(
    ("mirror", "expected"),
    [
        (torch.tensor([7, 2, 9], dtype=torch.int16), (9, 18)),
        (torch.tensor([200, 2], dtype=torch.uint8), (200, 202)),
        (torch.tensor([5]).expand(4), (5, 20)),
        (torch.tensor([[1, 2], [3, 9]])[:, 1], (9, 11)),
        (torch.tensor([], dtype=torch.int64), (0, 0)),
        (torch.tensor([3, 4]).pin_memory() if torch.cuda.is_available() else torch.tensor([3, 4]),
         (4, 7)),
        (torch.nn.Parameter(torch.tensor([3, 4]), requires_grad=False), (4, 7)),
        (torch.full((70_000,), 3), (3, 210_000)),
        (torch.tensor([2**62] * 3), (NOT_OBSERVED_CODE, NOT_OBSERVED_CODE)),
        (torch.tensor([-(2**63), -5]), (NOT_OBSERVED_CODE, NOT_OBSERVED_CODE)),
        (torch.tensor([1, 2], device="meta"), (NOT_OBSERVED_CODE, NOT_OBSERVED_CODE)),
    ],
)  # fmt: skip
def test_largest_and_sum_of_other_tensors(mirror: Any, expected: tuple[int, int]) -> None:
    assert lengths(mirror) == expected


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (torch.empty(4, 2), 4),
        (torch.empty(0, 2), 0),
        (torch.empty(4, 2, device="meta"), 4),
        (torch.empty(4).to_sparse(), 4),
        (torch.empty(3, dtype=torch.float8_e4m3fn), 3),
        (torch.tensor(5), NOT_OBSERVED_CODE),
    ],
)
def test_rows_of_any_tensor(tensor: Any, rows: int) -> None:
    assert taken(seq_lens=tensor)[ROWS] == rows


def made(shape: tuple[int, ...], kind: str) -> Any:
    if kind == "sparse":
        return torch.zeros(shape).to_sparse()
    dtype = torch.float8_e4m3fn if kind == "float8" else torch.bfloat16
    return torch.empty(shape, dtype=dtype, device="meta" if kind == "meta" else "cpu")


@pytest.mark.parametrize("kind", ["dense", "float8", "meta", "sparse"])
def test_launches_are_told_apart_by_shape(tmp_path: Path, kind: str) -> None:
    kernel = Kernel(Recorder(tmp_path), "flash_mla_with_kvcache")
    splits, cache_seqlens = torch.empty(5), torch.empty(4)

    def call(q: tuple[int, ...], indices: tuple[int, ...] | None) -> None:
        given = {} if indices is None else {"indices": made(indices, kind)}
        kernel(
            q=made(q, kind), k_cache=made((9, 2), kind), cache_seqlens=cache_seqlens,
            num_splits=splits, head_dim_v=8, **given,
        )  # fmt: skip

    def body() -> None:
        for _ in range(3):
            call((4, 1, 2, 8), (4, 1, 6))
        for other in ((5, 1, 2, 8), (4, 2, 2, 8), (4, 1, 2), ()):
            call(other, (4, 1, 6))
            call(other, (4, 1, 6))
        call((4, 1, 2, 8), (4, 1, 7))
        call((4, 1, 2, 8), None)
        call((4, 1, 2, 8), (4, 1, 6))

    kernel.forward(body)
    launches = kernel.recorder.events("launch")
    assert [launch["count"] for launch in launches] == [4, 2, 2, 2, 2, 1, 1]
    assert [list(launch["q.shape"] or []) for launch in launches[:4]] == [
        [4, 1, 2, 8],
        [5, 1, 2, 8],
        [4, 2, 2, 8],
        [4, 1, 2],
    ]
