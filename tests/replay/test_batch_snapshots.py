"""Snapshots of a batch in the worker: what changed in place is seen, what is gone is not kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from padtrace.recording import schema
from padtrace.recording.absent import Absent
from padtrace.replay.worker.snapshots import SnapshotTaker
from padtrace.replay.worker.standins import Unobserved

torch = pytest.importorskip("torch", reason="a batch holds tensors")


@dataclass
class Spec:
    """A speculative input."""

    num_tokens_per_req: int


@dataclass
class Batch:
    """Some fields of a ForwardBatch; the others are set as attributes by `_batch`."""

    batch_size: int
    global_num_tokens_cpu: list[int] | None = None
    lora_ids: list[str | None] | None = None
    seq_lens_cpu: Any = None
    input_ids: Any = None
    spec_info: Any = None
    extend_seq_lens_cpu: Any = field(default=None)


def _taker() -> SnapshotTaker:
    return SnapshotTaker(Batch, 0)


def test_a_list_edited_in_place_is_seen() -> None:
    taker, batch = _taker(), Batch(2, global_num_tokens_cpu=[3, 1], lora_ids=[None])
    first = taker.take(batch)
    assert taker.take(batch) is first
    batch.global_num_tokens_cpu[0] = 4
    batch.lora_ids.append(None)
    second = taker.take(batch)
    assert (first["global_num_tokens_cpu"], second["global_num_tokens_cpu"]) == ([3, 1], [4, 1])
    assert (first["lora_ids.rows"], second["lora_ids.rows"]) == (1, 2)
    batch.lora_ids = None
    assert taker.take(batch)["lora_ids.rows"] is None


def test_lengths_edited_in_place_are_seen() -> None:
    taker, batch = _taker(), Batch(2, seq_lens_cpu=torch.tensor([5, 7]))
    assert taker.take(batch)["seq_lens_cpu.max"] == 7
    batch.seq_lens_cpu.add_(1)
    assert (taker.take(batch)["seq_lens_cpu.max"], taker.take(batch)["seq_lens_cpu.sum"]) == (8, 14)


def test_a_list_that_is_a_tensor_is_read_as_one() -> None:
    taker, batch = _taker(), Batch(2, extend_seq_lens_cpu=torch.tensor([5, 7]))
    assert taker.take(batch)["extend_seq_lens_cpu"] == [5, 7]
    batch.extend_seq_lens_cpu[0] = 6
    assert taker.take(batch)["extend_seq_lens_cpu"] == [6, 7]


def test_nothing_of_the_batch_before_is_kept() -> None:
    taker = _taker()
    rich = Batch(
        3,
        global_num_tokens_cpu=[3, 1],
        lora_ids=[None],
        seq_lens_cpu=torch.tensor([5, 7, 9]),
        input_ids=torch.zeros(3),
        spec_info=Spec(2),
    )
    bare = Batch(1, spec_info=Unobserved("forward_batch.spec_info"))
    before = taker.take(rich)
    assert before["spec_info.num_tokens_per_req"] == 2
    after = taker.take(bare)
    assert after == {**dict.fromkeys(schema.SNAPSHOT.names()), **_taker().take(bare)}
    assert after["spec_info.num_tokens_per_req"] is Absent.NOT_OBSERVED
    assert taker.take(rich) == before
