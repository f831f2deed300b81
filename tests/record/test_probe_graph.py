"""Graph runners: the verdict, the numbers it came from, the bucket."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padtrace.record.hooks import Hook, watching
from padtrace.record.probes.graph import BucketWatch, GraphProbe
from padtrace.recording.absent import Absent
from tests.record.standins import ModelRunner, Recorder, Tensor, decode_batch, never


class Runner:
    def __init__(self, **attributes: Any) -> None:
        self.model_runner = ModelRunner(is_draft_worker=True)
        self.model_runner.spec_algorithm = SimpleNamespace(name="EAGLE")  # type: ignore[attr-defined]
        self.__dict__.update(attributes)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def graph(recorder: Recorder, function: str, original: Any, *, chooses: bool) -> Any:
    return recorder.hook(GraphProbe(recorder.context, function, chooses=chooses), original)


def watched(recorder: Recorder, after: Any, original: Any) -> Any:
    hook = Hook(recorder.state, "bucket", recorder.writer.hook("bucket", "found"))
    hooked = watching(hook, recorder.state, never, after=after)
    return lambda *args, **kwargs: hooked(original, *args, **kwargs)


def test_a_refusal_and_the_number_it_was_judged_by(recorder: Recorder) -> None:
    largest = watched(recorder, BucketWatch(recorder.context).largest, lambda batch: 40)
    runner = Runner(capture_bs=[1, 2, 4, 32], captured_req_width=6, max_bs=32)
    judge = graph(
        recorder, "can_run_graph", lambda r, batch: largest(batch) <= r.max_bs, chooses=False
    )
    assert judge(runner, decode_batch(3)) is False
    (event,) = recorder.events("graph")
    assert (event["runner"], event["function"]) == ("Runner", "can_run_graph")
    assert (event["worker"], event["algorithm"]) == ("draft", "EAGLE")
    assert (event["raw_bs"], event["bucket_argument"], event["verdict"]) == (3, 40, 0)
    assert (event["captured_bs"], event["max_bs"]) == ([1, 2, 4, 32], 32)
    assert event["num_tokens_per_bs"] == 6
    assert event["bucket"] is Absent.NOT_OBSERVED
    assert event.snapshot("entry")["batch_size"] == 3


def test_the_bucket_chosen_by_pad_to_bucket(recorder: Recorder) -> None:
    choose = watched(recorder, BucketWatch(recorder.context).padded, lambda raw, buckets: 4)
    load = graph(recorder, "load_batch", lambda runner, batch: choose(3, [1, 2, 4]), chooses=True)
    load(Runner(capture_bs=[1, 2, 4], max_bs=4), decode_batch(2))
    (event,) = recorder.events("graph")
    assert (event["bucket_argument"], event["bucket"]) == (3, 4)
    assert event["verdict"] is Absent.NOT_OBSERVED


def test_releases_without_pad_to_bucket_leave_it_on_the_runner(recorder: Recorder) -> None:
    load = graph(recorder, "replay", lambda runner, batch: setattr(runner, "bs", 8), chooses=True)
    load(Runner(num_tokens_per_bs=1), decode_batch(5))
    (event,) = recorder.events("graph")
    assert event["bucket"] == 8
    assert event["bucket_argument"] is Absent.NOT_OBSERVED
    assert event["captured_bs"] is Absent.NOT_OBSERVED
    assert event["max_bs"] is Absent.NO_ATTRIBUTE
    assert event["num_tokens_per_bs"] == 1


def test_a_verdict_on_the_device_is_not_waited_for(recorder: Recorder) -> None:
    verdict = Tensor()
    judge = graph(recorder, "can_run_graph", lambda runner, batch: verdict, chooses=False)
    assert judge(Runner(), decode_batch(1)) is verdict
    assert recorder.events("graph")[0]["verdict"] is Absent.NOT_OBSERVED


def test_a_replay_is_in_the_ring_before_it_runs(recorder: Recorder) -> None:
    seen: list[int] = []
    replay = graph(
        recorder,
        "execute",
        lambda runner, batch: seen.append(len(recorder.events("graph"))),
        chooses=True,
    )
    replay(Runner(), decode_batch(1))
    assert seen == [1]
