"""Snapshots: every number is the one an eye would read off the batch; no device value is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from padtrace.record.native import Snapshot
from padtrace.record.snapshots import SnapshotTaker
from padtrace.recording import schema
from padtrace.recording.absent import NO_ATTRIBUTE_CODE, NONE_CODE, NOT_OBSERVED_CODE
from tests.record.standins import ForwardBatch, HostTensor, Mode, PaddingMode, Tensor, decode_batch


class Reading:
    """Takes snapshots and reads them by column name."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self.taker = SnapshotTaker(ForwardBatch, self._string, lambda: 1)

    def _string(self, text: str) -> int:
        if text not in self.strings:
            self.strings.append(text)
        return self.strings.index(text)

    def __call__(self, batch: Any) -> dict[str, Any]:
        return self.read(self.taker.take(batch))

    def read(self, snapshot: Snapshot) -> dict[str, Any]:
        found: dict[str, Any] = {}
        values = iter(snapshot.values)
        for column, code in zip(schema.SNAPSHOT.columns, snapshot.scalars, strict=True):
            found[column.name] = code
            if column.type is schema.ColumnType.VECTOR and code >= 0:
                found[column.name] = [next(values) for _ in range(code)]
            if column.type is schema.ColumnType.STRING and code >= 0:
                found[column.name] = self.strings[code]
        assert next(values, None) is None
        return found


@pytest.fixture
def look() -> Reading:
    return Reading()


def test_rows_integers_names_and_vectors(look: Reading) -> None:
    batch = decode_batch(
        3,
        seq_lens_cpu=HostTensor([7, 2, 9]),
        global_num_tokens_cpu=[3, 1],
        dp_padding_mode=PaddingMode.MAX_LEN,
        lora_ids=["a", None, None],
    )
    seen = look(batch)
    assert seen["forward_mode"] == "DECODE"
    # Mode.EXTEND and PaddingMode.MAX_LEN are both 1; neither may be taken for the other.
    assert seen["dp_padding_mode"] == "MAX_LEN"
    assert (seen["batch_size"], seen["input_ids.rows"], seen["lora_ids.rows"]) == (3, 3, 3)
    assert (seen["seq_lens_cpu.max"], seen["seq_lens_cpu.sum"]) == (9, 18)
    assert seen["global_num_tokens_cpu"] == [3, 1]
    assert seen["forward_metadata_ready"] == 0


def test_the_three_kinds_of_absent_are_kept_apart(look: Reading) -> None:
    seen = look(decode_batch(extend_seq_lens_cpu=None))
    assert seen["extend_seq_lens_cpu"] == NONE_CODE
    assert seen["mrope_positions.rows"] == NO_ATTRIBUTE_CODE
    seen = look(decode_batch(seq_lens_sum=Tensor()))  # a device scalar: nobody may look
    assert seen["seq_lens_sum"] == NOT_OBSERVED_CODE


def test_an_unchanged_batch_gives_the_very_same_snapshot(look: Reading) -> None:
    batch = decode_batch()
    assert look.taker.take(batch) is look.taker.take(batch)


def test_what_was_replaced_is_seen_and_the_earlier_snapshot_stays(look: Reading) -> None:
    batch = decode_batch(3)
    before = look.taker.take(batch)
    batch.input_ids = Tensor(4)
    batch.forward_mode = Mode.EXTEND
    batch.seq_lens_cpu = HostTensor([5, 5, 5, 1])
    seen = look(batch)
    assert (seen["input_ids.rows"], seen["forward_mode"], seen["seq_lens_cpu.sum"]) == (
        4,
        "EXTEND",
        16,
    )
    assert look.read(before)["input_ids.rows"] == 3


@pytest.mark.parametrize(
    ("name", "edit", "expected"),
    [
        ("extend_seq_lens_cpu", lambda batch: batch.extend_seq_lens_cpu.append(1), [6, 1]),
        ("global_num_tokens_cpu", lambda b: b.global_num_tokens_cpu.__setitem__(0, 4), [4, 1]),
        ("lora_ids.rows", lambda batch: batch.lora_ids.extend([None]), 2),
    ],
)
def test_lists_that_sglang_edits_in_place(
    look: Reading, name: str, edit: Any, expected: Any
) -> None:
    batch = decode_batch(1, extend_seq_lens_cpu=[6], global_num_tokens_cpu=[3, 1])
    look(batch)
    edit(batch)
    assert look(batch)[name] == expected


def test_an_empty_list_that_grows(look: Reading) -> None:
    batch = decode_batch(1, extend_seq_lens_cpu=[])
    assert look(batch)["extend_seq_lens_cpu"] == []
    batch.extend_seq_lens_cpu.append(2)
    assert look(batch)["extend_seq_lens_cpu"] == [2]


def test_the_speculative_input_and_its_change_in_place(look: Reading) -> None:
    draft = SimpleNamespace(num_tokens_per_req=6, topk_p=Tensor(2), hidden_states=None)
    batch = decode_batch(2, spec_info=draft)
    seen = look(batch)
    assert seen["spec_info"] == "SimpleNamespace"
    assert (seen["spec_info.num_tokens_per_req"], seen["spec_info.topk_p.rows"]) == (6, 2)
    assert seen["spec_info.hidden_states.rows"] == NONE_CODE
    assert seen["spec_info.draft_token_num"] == NO_ATTRIBUTE_CODE
    draft.topk_p = Tensor(4)
    assert look(batch)["spec_info.topk_p.rows"] == 4
    batch.spec_info = None
    seen = look(batch)
    assert seen["spec_info"] == NONE_CODE
    assert seen["spec_info.num_tokens_per_req"] == NONE_CODE


def test_two_batches_in_turn_do_not_mix(look: Reading) -> None:
    one, two = decode_batch(1), decode_batch(2, global_num_tokens_cpu=[2, 2])
    for _ in range(2):
        assert look(one)["input_ids.rows"] == 1
        assert look(one)["global_num_tokens_cpu"] == NONE_CODE
        seen = look(two)
        assert (seen["input_ids.rows"], seen["global_num_tokens_cpu"]) == (2, [2, 2])
    look.taker.forget()
    seen = look(one)
    assert (seen["input_ids.rows"], seen["seq_lens_cpu.sum"]) == (1, 5)
    assert seen["global_num_tokens_cpu"] == NONE_CODE


def test_a_long_mirror_is_reduced_by_the_tensor_itself(look: Reading) -> None:
    class LongMirror:
        is_cpu = True
        shape = (500,)

        def max(self) -> int:
            return 900

        def sum(self) -> int:
            return 4500

    seen = look(decode_batch(seq_lens_cpu=LongMirror()))
    assert (seen["seq_lens_cpu.max"], seen["seq_lens_cpu.sum"]) == (900, 4500)


def test_a_mirror_that_is_not_on_the_host_is_not_read(look: Reading) -> None:
    seen = look(decode_batch(seq_lens_cpu=Tensor(3)))
    assert seen["seq_lens_cpu.rows"] == 3
    assert seen["seq_lens_cpu.max"] == NOT_OBSERVED_CODE


def test_a_view_with_some_of_the_attributes(look: Reading) -> None:
    view = SimpleNamespace(
        batch_size=8, forward_mode=Mode.DECODE, seq_lens=Tensor(8), global_num_tokens_cpu=[8, 8]
    )
    seen = look(view)
    assert (seen["batch_size"], seen["seq_lens.rows"]) == (8, 8)
    assert seen["global_num_tokens_cpu"] == [8, 8]
    assert seen["input_ids.rows"] == NO_ATTRIBUTE_CODE


def test_no_tensor_is_kept_after_forget(look: Reading) -> None:
    import gc
    import weakref

    class Traced:
        shape = (3,)

    held = Traced()
    batch = decode_batch(input_ids=held)
    look(batch)
    gone = weakref.ref(held)
    del held, batch
    look.taker.forget()
    gc.collect()
    assert gone() is None
