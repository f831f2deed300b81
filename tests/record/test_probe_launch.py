"""Kernel calls: told before they are made, equal ones counted, none confused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padtrace.record.alarm import Alarm
from padtrace.record.failures import ErrorRecorder
from padtrace.record.hooks import Hook
from padtrace.record.probes.forward import ForwardProbe
from padtrace.record.probes.launch import LaunchProbe
from padtrace.recording.absent import Absent
from tests.record.standins import ModelRunner, Output, Recorder, Tensor, decode_batch, never


class Kernel:
    """flash_mla_with_kvcache, hooked; `forward` runs a body inside a hooked forward."""

    def __init__(self, recorder: Recorder, function: str, alarm: Any = None) -> None:
        self.recorder = recorder
        self.calls = 0
        self.error: Exception | None = None
        self.probe = LaunchProbe(recorder.context, function, alarm)
        hook = Hook(recorder.state, function, recorder.writer.hook(function, "found"))
        self._hooked = self.probe.around(hook, never)

    def _original(self, *args: Any, **kwargs: Any) -> str:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return "out"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hooked(self._original, *args, **kwargs)

    def forward(self, body: Any) -> None:
        def original(runner: ModelRunner, batch: Any) -> Output:
            body()
            return Output()

        probe = ForwardProbe(self.recorder.context, self.probe.finish, lambda runner: None, None)
        self.recorder.hook(probe, original)(ModelRunner(), decode_batch())


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(Recorder(tmp_path), "flash_mla_with_kvcache")


def arguments(rows: int, splits: Any, cache_seqlens: Any) -> dict[str, Any]:
    return {
        "q": Tensor(rows, 1, 64, 576, dtype="torch.bfloat16"),
        "k_cache": Tensor(65, 64, 1, 656, dtype="torch.float8_e4m3fn"),
        "cache_seqlens": cache_seqlens,
        "head_dim_v": 512,
        "tile_scheduler_metadata": Tensor(132, 8),
        "num_splits": splits,
        "indices": Tensor(rows, 1, 2048),
        "block_table": Tensor(rows, 0),
        "is_fp8_kvcache": True,
    }


def test_sixty_one_layers_are_one_event_with_a_count(kernel: Kernel) -> None:
    splits, lengths = Tensor(3), Tensor(2)
    kernel.forward(lambda: [kernel(**arguments(2, splits, lengths)) for _ in range(61)])
    (event,) = kernel.recorder.events("launch")
    assert kernel.calls == 61
    assert (event["count"], event["failed"]) == (61, 0)
    assert event["q.shape"] == [2, 1, 64, 576]
    assert (event["q.dtype"], event["k_cache.dtype"]) == ("torch.bfloat16", "torch.float8_e4m3fn")
    assert (event["num_splits.rows"], event["cache_seqlens.rows"]) == (3, 2)
    assert (event["block_table.shape"], event["indices.shape"]) == ([2, 0], [2, 1, 2048])
    assert (event["head_dim_v"], event["is_fp8_kvcache"]) == (512, 1)
    assert event["parent"] == kernel.recorder.events("forward")[0]["enter_seq"]
    hooks = kernel.recorder.recording().coverage["hooks"]
    assert hooks["flash_mla_with_kvcache"]["fired"] == {"0": 61}


def test_other_shapes_and_other_forwards_are_other_events(kernel: Kernel) -> None:
    splits, lengths, longer = Tensor(3), Tensor(2), Tensor(4)

    def body() -> None:
        for _ in range(2):
            kernel(**arguments(2, splits, lengths))
            kernel(**arguments(3, longer, lengths))

    kernel.forward(body)
    kernel.forward(lambda: kernel(**arguments(2, splits, lengths)))
    events = kernel.recorder.events("launch")
    assert [(e["q.shape"][0], e["num_splits.rows"], e["count"]) for e in events] == [
        (2, 3, 2),
        (3, 4, 2),
        (2, 3, 1),
    ]
    assert [e["forward"] for e in events] == [0, 0, 1]


def test_same_shapes_with_another_plan_object_are_still_equal(kernel: Kernel) -> None:
    kernel.forward(lambda: [kernel(**arguments(2, Tensor(3), Tensor(2))) for _ in range(3)])
    assert [e["count"] for e in kernel.recorder.events("launch")] == [3]


def test_the_same_plan_with_more_query_rows_is_not_equal(kernel: Kernel) -> None:
    splits, lengths = Tensor(3), Tensor(2)
    kernel.forward(lambda: [kernel(**arguments(rows, splits, lengths)) for rows in (2, 8)])
    assert [e["q.shape"][0] for e in kernel.recorder.events("launch")] == [2, 8]


def test_a_query_by_position_is_no_repetition_of_a_call_by_names(kernel: Kernel) -> None:
    splits, cache_seqlens = Tensor(4), Tensor(3)

    def body() -> None:
        for given in ({"num_splits": splits}, {}):
            kernel(Tensor(3, 1), cache_seqlens=cache_seqlens, **given)
            kernel(Tensor(3, 1), cache_seqlens=cache_seqlens, **given)
        kernel(q=Tensor(3, 1), cache_seqlens=cache_seqlens)

    kernel.forward(body)
    launches = kernel.recorder.events("launch")
    assert [launch["count"] for launch in launches] == [2, 3]
    hooks = kernel.recorder.recording().coverage["hooks"]
    assert hooks["flash_mla_with_kvcache"]["status"] == "found"


def test_num_splits_inside_a_scheduler_object(kernel: Kernel) -> None:
    given = arguments(2, None, Tensor(2))
    given["tile_scheduler_metadata"] = SimpleNamespace(
        tile_scheduler_metadata=Tensor(132, 8), num_splits=Tensor(3)
    )
    kernel.forward(lambda: kernel(**given))
    (event,) = kernel.recorder.events("launch")
    assert (event["num_splits.rows"], event["tile_scheduler_metadata.rows"]) == (3, 132)


def test_deep_gemm_by_its_own_argument_names_and_by_position(tmp_path: Path) -> None:
    kernel = Kernel(Recorder(tmp_path), "fp8_paged_mqa_logits")
    q, cache, weights, lengths, table = (
        Tensor(4, 1, 64, 128),
        Tensor(65, 64, 1, 132),
        Tensor(4, 64),
        Tensor(4, 1),
        Tensor(4, 7),
    )
    kernel.forward(
        lambda: [
            kernel(q, cache, weights, lengths, table, None, 448),
            kernel(q=q, fused_kv_cache=cache, weights=weights, context_lens=lengths,
                   block_table=table),
        ]
    )  # fmt: skip
    (event,) = kernel.recorder.events("launch")
    assert event["count"] == 2
    assert (event["cache_seqlens.rows"], event["k_cache.shape"]) == (4, [65, 64, 1, 132])
    assert event["num_splits.rows"] is None


def test_a_launch_is_in_the_ring_before_the_kernel_runs(kernel: Kernel) -> None:
    kernel.error = RuntimeError("num_splits must have shape (b+1)")
    kernel.recorder.state.on_error.append(ErrorRecorder(kernel.recorder.state, None))
    with pytest.raises(RuntimeError):
        kernel.forward(lambda: kernel(**arguments(2, Tensor(2), Tensor(1))))
    (event,) = kernel.recorder.events("launch")
    assert (event["q.shape"][0], event["num_splits.rows"], event["failed"]) == (2, 2, 1)
    (error,) = kernel.recorder.events("error")
    assert (error["function"], error["parent"]) == ("flash_mla_with_kvcache", event["enter_seq"])
    assert kernel.recorder.events("forward")[0]["failed"] == 1


def test_a_killed_process_leaves_the_launch_it_died_in(kernel: Kernel) -> None:
    """Nothing after the call: what is in the ring while the kernel runs."""
    seen: list[Any] = []

    def look(**kwargs: Any) -> None:
        seen.extend(kernel.recorder.events("launch"))

    kernel._original = look  # type: ignore[assignment,method-assign]
    kernel.forward(lambda: kernel(**arguments(2, Tensor(3), Tensor(2))))
    assert seen[0]["num_splits.rows"] == 3
    assert seen[0]["failed"] is Absent.NOT_OBSERVED


def test_the_alarm_is_raised_before_the_kernel_and_once_per_shape(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path)
    kernel = Kernel(recorder, "flash_mla_with_kvcache", Alarm(recorder.state, "rings"))
    told: list[int] = []
    kernel._original = (  # type: ignore[assignment,method-assign]
        lambda **kwargs: told.append(len(caplog.records))
    )
    splits, lengths = Tensor(2), Tensor(1)
    kernel.forward(lambda: [kernel(**arguments(2, splits, lengths)) for _ in range(3)])
    assert told == [1, 1, 1]
    assert "q with 2 rows and num_splits with 2, needs 3" in caplog.records[0].message
