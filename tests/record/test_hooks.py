"""The hook around a function: one call, the same result, the same exception, whatever we do."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from padtrace.record.failures import ErrorRecorder
from padtrace.record.hooks import Hook, around, bound, watching
from padtrace.record.probes.batch import InitNewProbe, SyncProbe
from padtrace.record.probes.forward import ForwardProbe
from padtrace.record.probes.graph import GraphProbe
from padtrace.record.probes.launch import LaunchProbe
from padtrace.record.probes.pad import PadInputsProbe, PadProbe, UnpadProbe
from padtrace.record.probes.plan import PlanProbe
from padtrace.record.probes.ready import ReadyProbe
from padtrace.record.state import Frame
from tests.record.standins import ModelRunner, Output, Recorder, decode_batch, never


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def forward_probe(recorder: Recorder) -> ForwardProbe:
    return ForwardProbe(recorder.context, lambda: None, lambda runner: None, None)


def all_probes(recorder: Recorder) -> list[Any]:
    context = recorder.context
    return [
        forward_probe(recorder),
        InitNewProbe(context, None),
        SyncProbe(context),
        ReadyProbe(context),
        PadProbe(context),
        PadInputsProbe(context),
        UnpadProbe(context),
        PlanProbe(context, "init_forward_metadata", lambda: None),
        GraphProbe(context, "can_run_graph", chooses=False),
    ]


class Counted:
    """An original function that counts its calls."""

    def __init__(self, result: Any = "result", error: BaseException | None = None) -> None:
        self.calls = 0
        self.result = result
        self.error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self.result


@pytest.mark.parametrize("index", range(9))
@pytest.mark.parametrize("method", ["enter", "leave"])
def test_a_probe_that_fails_is_lost_and_the_result_is_the_same(
    tmp_path: Path, index: int, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path)
    probe = all_probes(recorder)[index]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("injected")

    if method == "leave":
        opened = recorder.state.enter
        probe.enter = lambda *args, **kwargs: opened("injected", recorder.state.nobody)
    setattr(probe, method, fail)
    original = Counted()
    hooked = recorder.hook(probe, original, "the_hook")
    assert [hooked(decode_batch(), ModelRunner()) for _ in range(3)] == ["result"] * 3
    assert original.calls == 3
    assert recorder.state.open == []
    entry = recorder.recording().coverage["hooks"]["the_hook"]
    assert entry["status"] == "lost"
    assert [r.message for r in caplog.records if "the_hook" in r.message] == [
        "padtrace: the probe of the_hook failed and is off: ValueError: injected"
    ]


def test_a_launch_probe_that_fails_is_lost(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    probe = LaunchProbe(recorder.context, "flash_mla_with_kvcache", None)
    hook = Hook(recorder.state, "launch", recorder.writer.hook("launch", "found"))
    hooked = probe.around(hook, never)
    # No tensor has a shape here, so the probe fails; the kernel does not care.
    assert hooked(Counted(), q=object(), num_splits=object()) == "result"
    assert recorder.state.open == []
    assert recorder.recording().coverage["hooks"]["launch"]["status"] == "lost"


def test_a_lost_inner_hook_leaves_the_outer_one_alone(recorder: Recorder) -> None:
    broken = PadProbe(recorder.context)
    broken.enter = lambda *args, **kwargs: 1 / 0  # type: ignore[method-assign]
    pad = recorder.hook(broken, Counted(None), "pad")
    batch = decode_batch()
    forward = recorder.hook(
        forward_probe(recorder), lambda runner, b: pad(b, runner) or Output(), "forward"
    )
    forward(ModelRunner(), batch)
    (event,) = recorder.events("forward")
    assert event["failed"] == 0
    assert event.integer("exit_seq") is not None


def test_an_exception_passes_unchanged_and_is_recorded_once(recorder: Recorder) -> None:
    recorder.state.on_error.append(ErrorRecorder(recorder.state, None))
    error = RuntimeError("num_splits must have shape (b+1)")
    pad = recorder.hook(PadProbe(recorder.context), Counted(error=error), "pad")
    forward = recorder.hook(
        forward_probe(recorder), lambda runner, batch: pad(batch, runner), "forward"
    )
    outer = watching(Hook(recorder.state, "run_batch", -1), recorder.state, never)
    with pytest.raises(RuntimeError) as caught:
        outer(lambda: forward(ModelRunner(), decode_batch()))
    assert caught.value is error
    assert error.__context__ is None
    assert error.__cause__ is None
    (event,) = recorder.events("error")
    assert event["function"] == "prepare_mlp_sync_batch"
    assert event["type"] == "RuntimeError"
    assert event["message"] == "num_splits must have shape (b+1)"
    (pad_event,) = recorder.events("pad")
    assert event["parent"] == pad_event["enter_seq"]
    (forward_event,) = recorder.events("forward")
    assert forward_event["failed"] == 1
    assert recorder.state.open == []


def test_an_exception_without_attributes_is_recorded_once_too(recorder: Recorder) -> None:
    class Bare(Exception):
        __slots__ = ()

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(name)

    hear = ErrorRecorder(recorder.state, None)
    error = Bare("x")
    hear(error, "forward", recorder.state.nobody)
    hear(error, "run_batch", recorder.state.nobody)
    assert [event["function"] for event in recorder.events("error")] == ["forward"]


def test_an_exception_that_sglang_swallows_does_not_upset_the_nesting(recorder: Recorder) -> None:
    plan = recorder.hook(
        PlanProbe(recorder.context, "init_forward_metadata", lambda: None),
        Counted(error=ImportError("no fused kernel")),
        "plan",
    )

    def original(runner: ModelRunner, batch: Any) -> Output:
        # As the multi-step backend does when a fused copy is missing.
        with contextlib.suppress(ImportError):
            plan(object(), batch)
        return Output()

    batch = decode_batch()
    forward = recorder.hook(forward_probe(recorder), original, "forward")
    forward(ModelRunner(), batch)
    forward(ModelRunner(), batch)
    assert recorder.state.open == []
    first, second = recorder.events("forward")
    assert (first["failed"], second["failed"]) == (0, 0)
    assert [event.integer("exit_seq") for event in recorder.events("plan")] == [None, None]
    assert second.integer("parent") is None


def test_a_broken_error_recorder_does_not_replace_the_servers_exception(
    recorder: Recorder,
) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("ours")

    recorder.state.on_error.append(broken)
    error = KeyError("theirs")
    forward = recorder.hook(forward_probe(recorder), Counted(error=error), "forward")
    with pytest.raises(KeyError) as caught:
        forward(ModelRunner(), decode_batch())
    assert caught.value is error
    assert recorder.state.open == []


def test_a_hook_lost_by_a_call_inside_it_leaves_nothing_open(recorder: Recorder) -> None:
    probe = forward_probe(recorder)
    enter, calls = probe.enter, [0]

    def once(*args: Any, **kwargs: Any) -> Frame:
        calls[0] += 1
        return enter(*args, **kwargs) if calls[0] == 1 else 1 // 0  # type: ignore[return-value]

    probe.enter = once  # type: ignore[method-assign]
    hooked: list[Any] = []

    def original(runner: ModelRunner, batch: Any) -> Output:
        if calls[0] == 1:
            hooked[0](runner, batch)
        return Output()

    hooked.append(recorder.hook(probe, original, "forward"))
    hooked[0](ModelRunner(), decode_batch())
    assert recorder.state.open == []
    assert recorder.recording().coverage["hooks"]["forward"]["status"] == "lost"
    pad = recorder.hook(PadProbe(recorder.context), Counted(None), "pad")
    pad(decode_batch(), ModelRunner())
    (event,) = recorder.events("pad")
    assert event.integer("parent") is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_watch_that_fails_is_lost_and_the_function_goes_on(recorder: Recorder, when: str) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise LookupError("ours")

    hook = Hook(recorder.state, "run_batch", recorder.writer.hook("run_batch", "found"))
    hooked = watching(hook, recorder.state, never, **{when: broken})  # type: ignore[arg-type]
    original = Counted("result")
    assert [hooked(original, 1, key=2) for _ in range(3)] == ["result"] * 3
    assert original.calls == 3
    told = recorder.recording().coverage["hooks"]["run_batch"]
    assert (told["status"], told["fired"]) == ("lost", {"0": 1})
    assert "LookupError" in told["note"]


def test_an_interrupt_is_not_taken_for_a_fault_of_ours(recorder: Recorder) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    recorder.state.on_error.append(interrupted)
    forward = recorder.hook(forward_probe(recorder), Counted(error=KeyError("x")), "forward")
    with pytest.raises(KeyboardInterrupt):
        forward(ModelRunner(), decode_batch())
    probe = PadProbe(recorder.context)
    probe.enter = interrupted  # type: ignore[method-assign,assignment]
    original = Counted(None)
    with pytest.raises(KeyboardInterrupt):
        recorder.hook(probe, original, "pad")(decode_batch(), ModelRunner())
    assert original.calls == 0


def test_inside_a_compilation_only_the_original_runs(recorder: Recorder) -> None:
    class Forbidden:
        def enter(self, *args: Any) -> Frame:
            raise AssertionError("the probe was asked")

        leave = enter

    hook = Hook(recorder.state, "forward", recorder.writer.hook("forward", "found"))
    hooked: Any = around(hook, Forbidden(), recorder.state, lambda: True)  # type: ignore[arg-type]
    # What torch.compile looks into is the code; where the extension stands in, a call runs no code.
    looked_into = FunctionType(hooked.__code__, hooked.__globals__, closure=hooked.__closure__)
    assert looked_into(Counted(), 1) == "result"
    assert hook.alive


@pytest.mark.parametrize("told_by", ["is_compiling", "is_dynamo_compiling"])
def test_a_hooked_function_compiles_with_fullgraph(recorder: Recorder, told_by: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    is_compiling = getattr(torch.compiler, told_by)
    torch.compiler.reset()
    calls: list[int] = []

    class Calls:
        def enter(self, *args: Any) -> None:
            calls.append(1)

        def leave(self, frame: Frame, result: Any) -> None:
            raise AssertionError("nothing was opened")

    hook = Hook(recorder.state, "double", recorder.writer.hook("double", "found"))
    hooked = around(hook, Calls(), recorder.state, is_compiling)
    launch = LaunchProbe(recorder.context, "flash_mla_with_kvcache", None)
    launch_hook = Hook(recorder.state, "kernel", recorder.writer.hook("kernel", "found"))
    plain = launch.around(launch_hook, is_compiling)
    # As an import hook puts it onto a module, where the original is known.
    kernel = bound(plain, lambda *, q: q + 1)

    def double(x: Any) -> Any:
        return x * 2

    def model(x: Any) -> Any:
        return kernel(q=plain(lambda *, q: q + 1, q=hooked(double, x)))

    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert compiled(torch.tensor([3])).tolist() == [8]
    assert calls == []
    assert recorder.recording().coverage["hooks"]["kernel"]["status"] == "found"
