"""The pad and the unpad: what they met, what they left, what they did to the caller's lists."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padtrace.record.probes.pad import PadInputsProbe, PadProbe, UnpadProbe
from padtrace.recording.absent import Absent
from tests.record.standins import (
    ForwardBatch,
    ModelRunner,
    PaddingMode,
    Recorder,
    Tensor,
    decode_batch,
)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def grow(batch: ForwardBatch, rows: int) -> None:
    batch.input_ids = Tensor(rows)
    assert batch.lora_ids is not None
    batch.lora_ids.extend([None] * (rows - len(batch.lora_ids)))


def test_a_pad_and_the_inner_call_that_does_the_work(recorder: Recorder) -> None:
    inner = recorder.hook(
        PadInputsProbe(recorder.context), lambda batch, runner, tokens, bs: grow(batch, tokens)
    )

    def prepare(batch: ForwardBatch, runner: ModelRunner) -> None:
        inner(batch, runner, 4, 4)
        batch.batch_size = 4
        batch.dp_padding_mode = PaddingMode.MAX_LEN
        batch.global_num_tokens_cpu = [4, 4]

    batch = decode_batch(3, global_num_tokens_cpu=[3, 1])
    recorder.hook(PadProbe(recorder.context), prepare)(batch, ModelRunner())
    (event,) = recorder.events("pad")
    entry, after = event.snapshot("entry"), event.snapshot("exit")
    assert event["function"] == "prepare_mlp_sync_batch"
    assert (event["num_tokens"], event["bs"]) == (4, 4)
    assert (entry["input_ids.rows"], after["input_ids.rows"]) == (3, 4)
    assert (entry["batch_size"], after["batch_size"]) == (3, 4)
    assert (entry["global_num_tokens_cpu"], after["global_num_tokens_cpu"]) == ([3, 1], [4, 4])
    assert (entry["dp_padding_mode"], after["dp_padding_mode"]) == (None, "MAX_LEN")
    assert event["owner.lora_ids.rows"] == 4  # the caller's own list grew
    assert event["owner.extend_seq_lens_cpu.rows"] is None
    assert event["scheduler_list_changed"] is Absent.NOT_OBSERVED


@pytest.mark.parametrize(("edit", "expected"), [(True, 1), (False, 0)])
def test_an_edit_of_the_schedulers_list_is_seen(
    recorder: Recorder, edit: bool, expected: int
) -> None:
    batch = decode_batch(3)
    record = recorder.context.record_of(batch)
    record.scheduler_counts = [3, 1]

    def prepare(batch: ForwardBatch, runner: ModelRunner) -> None:
        if edit and record.scheduler_counts:
            record.scheduler_counts[1] = 4

    recorder.hook(PadProbe(recorder.context), prepare)(batch, ModelRunner())
    assert recorder.events("pad")[0]["scheduler_list_changed"] == expected


def test_pad_inputs_alone_is_an_event_of_its_own(recorder: Recorder) -> None:
    hooked = recorder.hook(
        PadInputsProbe(recorder.context),
        lambda batch, runner, num_tokens, bs: grow(batch, num_tokens),
    )
    hooked(decode_batch(3), ModelRunner(), num_tokens=8, bs=3)
    (event,) = recorder.events("pad")
    assert event["function"] == "_pad_inputs_to_size"
    assert (event["num_tokens"], event["bs"]) == (8, 3)
    assert event.snapshot("exit")["input_ids.rows"] == 8


def test_a_child_of_two_batch_overlap_is_padded_as_a_batch_of_its_own(recorder: Recorder) -> None:
    inner = recorder.hook(
        PadInputsProbe(recorder.context), lambda batch, runner, tokens, bs: grow(batch, tokens)
    )
    child = decode_batch(1, tbo_parent_token_range=(0, 1))

    def prepare(batch: ForwardBatch, runner: ModelRunner) -> None:
        inner(batch, runner, 4, 4)
        inner(child, runner, 2, 1)

    recorder.hook(PadProbe(recorder.context), prepare)(decode_batch(3), ModelRunner())
    outer, of_child = recorder.events("pad")
    assert (outer["num_tokens"], of_child["num_tokens"]) == (4, 2)
    assert outer["batch"] != of_child["batch"]
    assert of_child["parent"] == outer["enter_seq"]
    assert of_child.snapshot("exit")["input_ids.rows"] == 2


def test_a_pad_that_raises_leaves_its_entry(recorder: Recorder) -> None:
    def prepare(batch: ForwardBatch, runner: ModelRunner) -> None:
        raise AssertionError

    with pytest.raises(AssertionError):
        recorder.hook(PadProbe(recorder.context), prepare)(decode_batch(3), ModelRunner())
    (event,) = recorder.events("pad")
    assert event.snapshot("entry")["input_ids.rows"] == 3
    assert event["exit"] is Absent.NOT_OBSERVED
    assert event.integer("exit_seq") is not None


def test_unpad_rows_before_and_after(recorder: Recorder) -> None:
    def post(batch: ForwardBatch, output: Any) -> None:
        batch.positions = Tensor(3)
        output.next_token_logits = Tensor(3, 100)

    output = SimpleNamespace(next_token_logits=Tensor(4, 100), hidden_states=None)
    batch = decode_batch(4)
    recorder.hook(UnpadProbe(recorder.context), post)(batch, output)
    (event,) = recorder.events("unpad")
    assert event.snapshot("entry")["positions.rows"] == 4
    assert event.snapshot("exit")["positions.rows"] == 3
    assert (event["logits_before.rows"], event["logits_after.rows"]) == (4, 3)
    assert event["hidden_states_before.rows"] is None
