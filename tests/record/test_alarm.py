"""The live alarm's one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from padtrace.record.alarm import MAX_LINES, Alarm
from tests.record.standins import Recorder, decode_batch


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def test_it_says_both_lengths_who_set_each_and_in_which_order(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    alarm = Alarm(recorder.state, "/rings")
    record = recorder.state.new_record(recorder.state.draft)
    record.padded("prepare_mlp_sync_batch", 57, 1, 2)
    record.planned("DeepseekSparseAttnBackend.init_forward_metadata", 49, 1, 2)
    alarm.launch("flash_mla_with_kvcache", record, 2, 2)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "\n" not in line
    assert "flash_mla_with_kvcache gets q with 2 rows and num_splits with 2, needs 3" in line
    plan = line.index("DeepseekSparseAttnBackend.init_forward_metadata planned num_splits 2")
    assert plan < line.index("then prepare_mlp_sync_batch took q from 1 to 2 rows")
    assert "padtrace seal /rings -o crash.safetensors && padtrace diff crash.safetensors" in line
    # The kernel's own error follows at once and adds nothing.
    alarm.failed("flash_mla_with_kvcache", record)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("q_rows", "splits"), [(2, 3), (0, 1), (-1, 3), (2, -1)])
def test_lengths_that_agree_or_were_not_observed_are_no_alarm(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, q_rows: int, splits: int
) -> None:
    alarm = Alarm(recorder.state, "rings")
    alarm.launch("flash_mla_with_kvcache", recorder.state.nobody, q_rows, splits)
    assert caplog.records == []


def test_another_exception_gets_a_line_with_the_history(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    alarm = Alarm(recorder.state, "rings")
    record = recorder.state.new_record(recorder.state.target)
    alarm.failed("prepare_mlp_sync_batch", record)
    assert "an exception left prepare_mlp_sync_batch" in caplog.text
    assert "nothing planned or padded it yet" in caplog.text


def test_a_server_that_goes_on_is_not_flooded(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    alarm = Alarm(recorder.state, "rings")
    for _ in range(100):
        alarm.launch("flash_mla_with_kvcache", recorder.state.nobody, 2, 2)
    assert len(caplog.records) == MAX_LINES


@pytest.mark.parametrize(
    ("ready", "equivalent", "lines"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_without_launches_a_plan_that_will_not_be_made_again_is_told_at_the_pad(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, ready: bool, equivalent: bool, lines: int
) -> None:
    alarm = Alarm(recorder.state, "rings")
    batch = decode_batch(
        8, forward_metadata_ready=ready, forward_metadata_replan_equivalent=equivalent
    )
    record = recorder.context.record_of(batch)
    record.planned("Backend.init_forward_metadata", 3, 6, 7)
    alarm.padded(record, recorder.context.snap(batch))
    assert len(caplog.records) == lines
    if lines:
        assert "q will have 8 rows and num_splits 7, needs 9" in caplog.text
