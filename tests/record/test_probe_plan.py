"""Plans of attention backends, eager, for graphs and for the steps of a draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padtrace.record.hooks import Hook, watching
from padtrace.record.probes.launch import LaunchProbe
from padtrace.record.probes.plan import (
    FlashMLAMetadataWatch,
    PlanProbe,
    SliceWatch,
    num_splits_rows,
)
from padtrace.recording.absent import NOT_OBSERVED_CODE, Absent
from tests.record.standins import ForwardBatch, Recorder, Tensor, decode_batch, never


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


@dataclass
class FlashMLAMetadata:
    flashmla_metadata: Any
    num_splits: Any


@dataclass
class Metadata:
    """A part of DSAMetadata, under the names of 0.5.12."""

    cache_seqlens_int32: Any
    nsa_cache_seqlens_int32: Any
    page_table_1: Any
    nsa_extend_seq_lens_list: list[int]
    max_seq_len_k: int
    flashmla_metadata: Any


class Backend:
    def __init__(self) -> None:
        self.forward_metadata: Any = None


def plan(recorder: Recorder, original: Any, method: str = "init_forward_metadata") -> Any:
    return recorder.hook(PlanProbe(recorder.context, method, lambda: None), original, method)


def watched(recorder: Recorder, after: Any, original: Any) -> Any:
    hook = Hook(recorder.state, "watched", recorder.writer.hook("watched", "found"))
    hooked = watching(hook, recorder.state, never, after=after)
    return lambda *args, **kwargs: hooked(original, *args, **kwargs)


def test_rows_planned_and_rows_of_the_metadata(recorder: Recorder) -> None:
    compute = watched(
        recorder,
        FlashMLAMetadataWatch(recorder.context).after,
        lambda backend, cache_seqlens, seq_len_q: FlashMLAMetadata(Tensor(132, 8), Tensor(7)),
    )

    def original(backend: Backend, batch: ForwardBatch) -> None:
        made = compute(backend, cache_seqlens=Tensor(6), seq_len_q=1)
        backend.forward_metadata = Metadata(Tensor(1), Tensor(6), Tensor(1, 40), [6], 40, made)

    plan(recorder, original)(Backend(), decode_batch(1))
    (event,) = recorder.events("plan")
    assert (event["backend"], event["function"]) == ("Backend", "init_forward_metadata")
    assert (event["planned.rows"], event["num_splits.rows"]) == (6, 7)
    assert event["dsa_cache_seqlens_int32.rows"] == 6
    assert event["dsa_extend_seq_lens_list.rows"] == 1
    assert (event["page_table_1.rows"], event["page_table_1.width"]) == (1, 40)
    assert event["max_seq_len_k"] == 40
    assert event["real_page_table.rows"] is Absent.NO_ATTRIBUTE
    assert event["graph_bucket"] is Absent.NOT_OBSERVED
    assert event.snapshot("entry")["batch_size"] == 1


def test_a_backend_without_metadata_still_counts_its_batch(recorder: Recorder) -> None:
    plan(recorder, lambda backend, batch: None)(object(), decode_batch(5))
    (event,) = recorder.events("plan")
    assert event.snapshot("entry")["input_ids.rows"] == 5
    assert event["num_splits.rows"] is Absent.NOT_OBSERVED


def test_multi_step_plans_nest_and_the_same_backend_is_not_told_twice(recorder: Recorder) -> None:
    steps = [Backend(), Backend()]
    out_graph = plan(recorder, lambda backend, batch: None, "init_forward_metadata_out_graph")
    inner = plan(recorder, lambda backend, batch: out_graph(backend, batch))
    outer = plan(recorder, lambda backend, batch: [inner(step, batch) for step in steps])
    outer(SimpleNamespace(), decode_batch(2))
    events = recorder.events("plan")
    assert [e["backend"] for e in events] == ["SimpleNamespace", "Backend", "Backend"]
    assert [e.integer("parent") for e in events] == [None, *[events[0]["enter_seq"]] * 2]
    assert len({e["backend_id"] for e in events}) == 3


def test_a_call_names_the_plan_whose_tensor_it_was_given(recorder: Recorder) -> None:
    """Two objects planned; the kernel takes the older plan, then the newer, then a copy."""

    def original(backend: Backend, batch: ForwardBatch) -> None:
        made = FlashMLAMetadata(Tensor(132, 8), Tensor(7))
        backend.forward_metadata = Metadata(Tensor(1), Tensor(6), Tensor(1, 40), [6], 40, made)

    hooked = plan(recorder, original)
    older, newer = Backend(), Backend()
    for backend in (older, newer, older):
        hooked(backend, decode_batch(1))
    stale, *planned = (event["enter_seq"] for event in recorder.events("plan"))
    probe = LaunchProbe(recorder.context, "flash_mla_with_kvcache", None)
    hook = Hook(recorder.state, "kernel", recorder.writer.hook("kernel", "found"))
    call = probe.around(hook, never)
    for rows, splits in enumerate(
        (
            older.forward_metadata.flashmla_metadata.num_splits,
            newer.forward_metadata.flashmla_metadata.num_splits,
            Tensor(7),
        )
    ):
        call(lambda **_: None, q=Tensor(rows + 1, 1, 64, 576), num_splits=splits)
    probe.finish()
    named = [event["plan_seq"] for event in recorder.events("launch")]
    assert named == [planned[1], planned[0], Absent.NOT_OBSERVED]
    assert stale not in named


@pytest.mark.parametrize(
    ("method", "arguments", "bucket"),
    [
        ("init_forward_metadata_out_graph", (SimpleNamespace(batch_size=8),), 8),
        ("init_forward_metadata_out_graph", (SimpleNamespace(batch_size=8), True), 8),
        ("init_forward_metadata_replay_cuda_graph", (16, Tensor(16)), 16),
        ("init_forward_metadata_replay_cuda_graph", (SimpleNamespace(batch_size=3), 4), 4),
    ],
)
def test_the_bucket_a_graph_plan_is_made_for(
    recorder: Recorder, method: str, arguments: tuple[Any, ...], bucket: int
) -> None:
    plan(recorder, lambda backend, *args: None, method)(Backend(), *arguments)
    assert recorder.events("plan")[0]["graph_bucket"] == bucket


def test_the_slice_of_num_splits_a_bucket_gets(recorder: Recorder) -> None:
    # A short graph buffer: the slice of 9 asked for has only 5.
    take = watched(
        recorder,
        SliceWatch(recorder.context).after,
        lambda metadata, sli: FlashMLAMetadata(None, Tensor(5)),
    )
    plan(
        recorder,
        lambda backend, batch: take(None, slice(0, 9)),
        "init_forward_metadata_out_graph",
    )(Backend(), SimpleNamespace(batch_size=8))
    (event,) = recorder.events("plan")
    assert (event["num_splits_slice.rows"], event["num_splits_slice.wanted"]) == (5, 9)


def test_get_mla_metadata_tells_the_plan_its_rows(recorder: Recorder) -> None:
    probe = LaunchProbe(recorder.context, "get_mla_metadata", None)
    hook = Hook(recorder.state, "get_mla_metadata", recorder.writer.hook("g", "found"))
    hooked = probe.around(hook, never)

    def original(backend: Backend, batch: ForwardBatch) -> None:
        hooked(lambda lens, per_head, heads: (Tensor(132, 8), Tensor(4)), Tensor(3), 64, 1)

    planner = PlanProbe(recorder.context, "init_forward_metadata", probe.finish)
    recorder.hook(planner, original)(Backend(), decode_batch(3))
    (event,) = recorder.events("plan")
    assert event["planned.rows"] == 3
    (launch,) = recorder.events("launch")
    assert launch["parent"] == event["enter_seq"]
    assert (launch["cache_seqlens.rows"], launch["num_splits.rows"]) == (3, 4)
    assert (launch["count"], launch["failed"]) == (1, 0)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (SimpleNamespace(flashmla_metadata=FlashMLAMetadata(None, Tensor(7))), 7),
        (
            SimpleNamespace(
                flashmla_metadata=FlashMLAMetadata(SimpleNamespace(num_splits=Tensor(5)), None)
            ),
            5,
        ),
        (SimpleNamespace(flashmla_metadata=Tensor(132, 8), num_splits=Tensor(3)), 3),
        (SimpleNamespace(num_splits=1), NOT_OBSERVED_CODE),
    ],
)
def test_num_splits_wherever_a_backend_keeps_it(metadata: Any, expected: int) -> None:
    assert num_splits_rows(metadata) == expected


def test_a_plan_that_raises_is_written(recorder: Recorder) -> None:
    def original(backend: Backend, batch: ForwardBatch) -> None:
        raise RuntimeError("x")

    with pytest.raises(RuntimeError):
        plan(recorder, original)(Backend(), decode_batch(2))
    (event,) = recorder.events("plan")
    assert event.snapshot("entry")["batch_size"] == 2
    assert event.integer("exit_seq") is not None
