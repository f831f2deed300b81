"""Batches, their counts, forwards and the order in which everything nests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padtrace.record.probes.batch import InitNewProbe, SyncProbe
from padtrace.record.probes.forward import ForwardProbe
from padtrace.record.probes.pad import PadProbe
from padtrace.record.probes.ready import ReadyProbe
from padtrace.record.probes.steps import StepCounter
from padtrace.recording.absent import Absent
from tests.record.standins import ForwardBatch, Mode, ModelRunner, Output, Recorder, decode_batch


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def schedule_batch(counts: list[int] | None) -> Any:
    return SimpleNamespace(
        global_num_tokens=counts,
        global_num_tokens_for_logprob=None if counts is None else [1] * len(counts),
        can_run_dp_cuda_graph=False,
    )


def copy_counts(batch: ForwardBatch, scheduled: Any, scale: int) -> None:
    batch.original_global_num_tokens_cpu = scheduled.global_num_tokens
    batch.global_num_tokens_cpu = (
        scheduled.global_num_tokens
        if scale == 1
        else [count * scale for count in scheduled.global_num_tokens]
    )
    batch.global_num_tokens_for_logprob_cpu = scheduled.global_num_tokens_for_logprob


def forward_hook(recorder: Recorder, original: Any, **options: Any) -> Any:
    probe = ForwardProbe(
        recorder.context,
        lambda: None,
        options.get("first_of", lambda runner: None),
        options.get("skip_flag"),
    )
    return recorder.hook(probe, original, "forward")


def test_sync_is_nested_in_the_batch_and_holds_counts_before_and_after(recorder: Recorder) -> None:
    sync = recorder.hook(
        SyncProbe(recorder.context),
        lambda batch, scheduled, device: copy_counts(batch, scheduled, 6),
    )

    def init_new(cls: type, scheduled: Any, runner: ModelRunner) -> ForwardBatch:
        batch = decode_batch(1)
        sync(batch, scheduled, "cpu")
        return batch

    hooked = recorder.hook(InitNewProbe(recorder.context, None), init_new)
    hooked(ForwardBatch, schedule_batch([1, 0]), ModelRunner(is_draft_worker=True))
    batch_event, sync_event = recorder.events()
    assert (batch_event.kind, sync_event.kind) == ("batch", "sync")
    assert sync_event["parent"] == batch_event["enter_seq"]
    assert batch_event["enter_seq"] < sync_event["enter_seq"] < sync_event["exit_seq"]
    assert sync_event["exit_seq"] < batch_event["exit_seq"]
    assert sync_event["worker"] == batch_event["worker"] == "draft"
    assert (sync_event["counts_before"], sync_event["counts_after"]) == ([1, 0], [6, 0])
    assert sync_event["original_counts"] == [1, 0]
    assert sync_event["aliases_scheduler_list"] == 0
    assert sync_event["draft_counts_before"] is Absent.NO_ATTRIBUTE
    assert sync_event["draft_logprob_counts_before"] is Absent.NO_ATTRIBUTE
    assert batch_event.snapshot("exit")["global_num_tokens_cpu"] == [6, 0]


def test_the_counts_of_draft_workers_are_kept_where_the_scheduler_has_them(
    recorder: Recorder,
) -> None:
    sync = recorder.hook(SyncProbe(recorder.context), lambda *args: None)
    scheduled = schedule_batch([8, 0])
    scheduled.draft_global_num_tokens = [8, 2]
    # A draft extends a whole prompt and needs logits of its last token only.
    scheduled.draft_global_num_tokens_for_logprob = [1, 2]
    sync(decode_batch(), scheduled)
    (event,) = recorder.events("sync")
    assert event["draft_counts_before"] == [8, 2]
    assert event["draft_logprob_counts_before"] == [1, 2]


def test_without_a_collective_there_is_no_sync_event(recorder: Recorder) -> None:
    sync = recorder.hook(SyncProbe(recorder.context), lambda *args: None)
    sync(decode_batch(), schedule_batch(None))
    assert recorder.events("sync") == []


def test_older_releases_get_the_sync_event_from_init_new(recorder: Recorder) -> None:
    def init_new(cls: type, scheduled: Any, runner: ModelRunner) -> ForwardBatch:
        batch = decode_batch(1)
        copy_counts(batch, scheduled, 1)
        return batch

    probe = InitNewProbe(recorder.context, SyncProbe(recorder.context))
    recorder.hook(probe, init_new)(ForwardBatch, schedule_batch([1, 2]), ModelRunner())
    (event,) = recorder.events("sync")
    assert event["function"] == "init_new"
    assert event["counts_before"] == event["counts_after"] == [1, 2]
    assert event["aliases_scheduler_list"] == 1
    assert event["parent"] == recorder.events("batch")[0]["enter_seq"]


def test_a_batch_that_no_init_new_made_gets_an_event_of_its_own(recorder: Recorder) -> None:
    forward = forward_hook(recorder, lambda runner, batch: Output())
    batch = decode_batch(4)
    forward(ModelRunner(), batch)
    forward(ModelRunner(), batch)
    (event,) = recorder.events("batch")
    assert (event["function"], event["worker"]) == ("construction", "target")
    assert event.snapshot("exit")["batch_size"] == 4
    assert [e["batch"] for e in recorder.events("forward")] == [event["batch"]] * 2


def test_a_copy_made_inside_a_forward_belongs_to_its_batch(recorder: Recorder) -> None:
    import dataclasses

    pad = recorder.hook(PadProbe(recorder.context), lambda batch, runner: None)

    def original(runner: ModelRunner, batch: ForwardBatch) -> Output:
        pad(dataclasses.replace(batch, batch_size=9), runner)
        return Output()

    forward_hook(recorder, original)(ModelRunner(), decode_batch())
    (event,) = recorder.events("pad")
    assert event["batch"] == recorder.events("forward")[0]["batch"]
    assert event.snapshot("entry")["batch_size"] == 9
    assert len(recorder.events("batch")) == 1


def test_a_shallow_copy_outside_is_another_batch(recorder: Recorder) -> None:
    import copy

    forward = forward_hook(recorder, lambda runner, batch: Output())
    batch = decode_batch()
    forward(ModelRunner(), batch)
    forward(ModelRunner(), copy.copy(batch))
    assert [e["batch"] for e in recorder.events("forward")] == [0, 1]


def test_draft_steps_are_forwards_of_one_batch(recorder: Recorder) -> None:
    forward = forward_hook(recorder, lambda runner, batch: Output())
    draft, target = decode_batch(), decode_batch()
    for _ in range(3):
        forward(ModelRunner(is_draft_worker=True), draft)
    forward(ModelRunner(), target)
    events = recorder.events("forward")
    assert [e["draft_step"] for e in events] == [0, 1, 2, 0]
    assert [e["forward"] for e in events] == [0, 1, 2, 3]
    assert [e["worker"] for e in events] == ["draft"] * 3 + ["target"]


@pytest.mark.parametrize("result", [Output(can_run_graph=True), ("logits", True)])
def test_the_end_of_a_forward_says_whether_a_graph_ran(recorder: Recorder, result: Any) -> None:
    forward_hook(recorder, lambda runner, batch: result)(ModelRunner(), decode_batch())
    (event,) = recorder.events("forward")
    assert (event["can_run_graph"], event["failed"]) == (1, 0)


def test_a_forward_is_in_the_ring_before_it_runs(recorder: Recorder) -> None:
    seen: list[int] = []

    def original(runner: ModelRunner, batch: ForwardBatch) -> Output:
        seen.append(len(recorder.events("forward")))
        return Output()

    forward_hook(recorder, original)(ModelRunner(), decode_batch())
    assert seen == [1]


def test_facts_are_asked_for_once_per_model_runner(recorder: Recorder) -> None:
    told: list[ModelRunner] = []
    forward = forward_hook(recorder, lambda runner, batch: Output(), first_of=told.append)
    one, two = ModelRunner(), ModelRunner(is_draft_worker=True)
    for runner in (one, two, one):
        forward(runner, decode_batch())
    assert told == [one, two]


def test_the_marker_and_the_older_flag_give_the_same_event(recorder: Recorder) -> None:
    def mark(batch: ForwardBatch, replan_equivalent: bool = False) -> None:
        batch.forward_metadata_planned_bs = batch.batch_size
        batch.forward_metadata_planned_num_tokens = 3
        batch.forward_metadata_replan_equivalent = replan_equivalent

    recorder.hook(ReadyProbe(recorder.context), mark)(decode_batch(3), replan_equivalent=True)
    older = forward_hook(
        recorder, lambda runner, batch, skip=False: Output(), skip_flag=ReadyProbe(recorder.context)
    )
    older(ModelRunner(), decode_batch(2), True)
    older(ModelRunner(), decode_batch(2))
    marked, flagged = recorder.events("ready")
    assert (marked["replan_equivalent"], marked["planned_bs"]) == (1, 3)
    assert marked["planned_num_tokens"] == 3
    assert flagged["replan_equivalent"] is Absent.NO_ATTRIBUTE
    assert (flagged["planned_bs"], flagged["planned_num_tokens"]) == (2, 2)


def test_steps_are_collectives_and_rounds_only_without_them(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = forward_hook(recorder, lambda runner, batch: Output())
    counter = StepCounter(recorder.context)
    forward(ModelRunner(), decode_batch())
    counter.round()
    forward(ModelRunner(), decode_batch())
    for _ in range(5):
        counter.sync()
    counter.round()
    forward(ModelRunner(), decode_batch())
    events = recorder.events("forward")
    assert [(e["step_source"], e["step"], e["phase"]) for e in events] == [
        ("round", 0, "warmup"),
        ("round", 1, "serve"),
        ("sync", 5, "serve"),
    ]


def test_skipped_gathers_are_no_steps(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "true")
    counter = StepCounter(recorder.context)
    counter.sync()
    counter.round()
    assert recorder.state.step == 1


def test_the_mode_before_a_relabel_is_kept(recorder: Recorder) -> None:
    batch = decode_batch(forward_mode=Mode.IDLE)
    forward_hook(recorder, lambda runner, b: setattr(b, "forward_mode", Mode.EXTEND))(
        ModelRunner(), batch
    )
    assert recorder.events("forward")[0]["forward_mode"] == "IDLE"
