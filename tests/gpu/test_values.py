"""Values of CUDA tensors: the moment is kept, and the forward path never waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padtrace.record.device_values.values_file import ValuesFile
from padtrace.record.values_reader import read_values

torch = pytest.importorskip("torch", reason="torch is not installed here")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Any operation that waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def keeper(path: Path, tier: str = "full") -> Any:
    from padtrace.record.device_values.keeper import Keeper

    kept = Keeper(ValuesFile.create(path, 64 << 20), tier)
    # The first tensor takes the pinned memory, which does wait; a server does that at warm-up.
    kept.batch(0, "exit.", SimpleNamespace(seq_lens=torch.zeros(1, device="cuda").long()))
    kept.finish()
    return kept


def test_the_values_are_those_of_the_moment(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kept = keeper(tmp_path / "a.values")
    batch = SimpleNamespace(seq_lens=torch.arange(1000, device="cuda"))
    request.getfixturevalue("no_waiting")
    for number in range(1, 50):
        kept.batch(number, "exit.", batch)
        # On the same stream, as SGLang edits lengths in place.
        batch.seq_lens.add_(1)
    torch.cuda.set_sync_debug_mode("default")
    kept.finish()
    found = read_values(tmp_path / "a.values", 0)
    assert found.counters["failed"] == found.counters["dropped"] == 0
    lists = {key.enter_seq: value.data.tolist() for key, value in found.tensors.items()}
    assert all(lists[n] == list(range(n - 1, n + 999)) for n in range(1, 50))


def test_a_launch_and_the_rows_it_reads(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kept = keeper(tmp_path / "a.values")
    cache = torch.arange(256, dtype=torch.uint8, device="cuda").reshape(8, 4, 1, 8)
    given = {
        "q": torch.ones((2, 1, 4, 8), dtype=torch.bfloat16, device="cuda"),
        "k_cache": cache,
        "indices": torch.tensor([[[3, -1]], [[31, 0]]], dtype=torch.int32, device="cuda"),
    }
    request.getfixturevalue("no_waiting")
    kept.launch(7, given)
    torch.cuda.set_sync_debug_mode("default")
    kept.finish()
    found = {k.field: v.data for k, v in read_values(tmp_path / "a.values", 0).tensors.items()}
    assert found["q"].shape == (2, 1, 4, 8)
    assert (found["q"] == 0x3F80).all()
    assert found["kv_rows"].view("uint8")[:, 0].tolist() == [24, 0, 248, 0]


def test_during_a_capture_nothing_is_copied(tmp_path: Path) -> None:
    kept = keeper(tmp_path / "a.values")
    batch = SimpleNamespace(seq_lens=torch.arange(8, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.seq_lens.add_(1)
        kept.batch(5, "exit.", batch)
    graph.replay()
    kept.finish()
    found = read_values(tmp_path / "a.values", 0)
    assert 5 not in {key.enter_seq for key in found.tensors}
    assert found.counters["dropped"] == 1
    assert kept.on
