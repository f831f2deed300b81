"""The extension writes what the plain classes write, leaks nothing, and is not needed."""

from __future__ import annotations

import contextlib
import inspect
import json
import mmap
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from padtrace.record import native, ring_core, wire
from padtrace.record import ring_format as form
from padtrace.record.hooks import Hook, around, bound, watching
from padtrace.record.probes.forward import ForwardProbe
from padtrace.record.ring import EventWriter
from padtrace.record.ring_file import create_file
from padtrace.record.ring_reader import Ring, read_ring
from padtrace.recording import schema
from padtrace.recording.absent import NONE_CODE, NOT_OBSERVED_CODE
from tests.record.standins import ModelRunner, Recorder, decode_batch, never
from tests.record.test_wire import events, numbers


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


ROOT = Path(__file__).resolve().parents[2]
needs_extension = pytest.mark.skipif(
    native.compiled is None, reason="the extension was not built: no C compiler, or PADTRACE_NATIVE"
)


def driven(folder: Path, steps: int, seed: int = 7, **variables: str) -> dict[str, Any]:
    """What native_script.py prints, in a process with these variables."""
    script = ("-m", "tests.record.native_script", str(folder), str(seed), str(steps))
    command = [sys.executable, *script]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


@needs_extension
@pytest.mark.parametrize("seed", [7, 8])
def test_a_process_with_it_records_what_one_without_it_records(tmp_path: Path, seed: int) -> None:
    with_it = driven(tmp_path / "with", 300, seed, PYTHONMALLOC="debug")
    without = driven(tmp_path / "without", 300, seed, PADTRACE_NATIVE="0")
    assert (with_it.pop("compiled"), without.pop("compiled")) == (True, False)
    with_it.pop("grown_blocks"), without.pop("grown_blocks")
    assert with_it == without
    counts = {kind: count for kind, (count, _) in with_it["events"].items()}
    assert sorted(counts) == sorted(wire.KINDS)
    assert min(counts.values()) > 9
    assert with_it["counters"]["forwards"] > 300
    assert with_it["alarms"][0] > 9
    assert {status for _, status, _ in with_it["hooks"]} == {"found"}
    fired = {name: calls for name, _, calls in with_it["hooks"]}
    assert 0 < fired["unpad"] < fired["pad"]  # the rest ended by an exception


@needs_extension
def test_it_leaks_nothing(tmp_path: Path) -> None:
    printed = driven(tmp_path, 4000)
    assert printed["compiled"]
    # 2,000 steps lie between the two counts; a leak of one object a step would be 2,000.
    assert printed["grown_blocks"] < 200


def test_the_plain_classes_pass_the_same_tests() -> None:
    names = ("ring", "snapshots", "hooks", "alarm", "probe_batch", "probe_graph", "probe_launch")
    files = [f"tests/record/test_{name}.py" for name in (*names, "probe_pad", "probe_plan")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *files]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PADTRACE_NATIVE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@needs_extension
@given(st.binary(max_size=4096), st.integers(0, 2**32 - 1))
def test_its_checksum_is_that_of_zlib(data: bytes, start: int) -> None:
    whole = data[: len(data) // 8 * 8]
    assert native.compiled.crc32(whole, start) == zlib.crc32(whole, start)


Operation = tuple[str, tuple[Any, ...]]


@st.composite
def operations(draw: st.DrawFn) -> list[Operation]:
    found: list[Operation] = []
    for name in draw(st.lists(st.sampled_from(("write", "update", "keep", "bad")), max_size=40)):
        if name == "write":
            found.append((name, draw(events())))
        elif name == "update":
            pairs = draw(st.lists(st.integers(-9, 99), max_size=8))
            found.append((name, (draw(st.integers(0, 9)), draw(st.integers(0, 99)), pairs)))
        elif name == "keep":
            found.append((name, draw(numbers(wire.SNAPSHOT))))
        else:
            wrong = draw(st.sampled_from((None, "7", 2**63, [1])))
            found.append(("write", (draw(st.integers(0, 9)), [1, wrong], ())))
    return found


def carried_out(
    base: Any, folder: Path, steps: list[Operation], last: Any = lambda writer: None
) -> tuple[Ring, list[int], int]:
    """What a ring of this class holds after the operations, the bad kinds, and where it stands."""

    class Writer(base):  # type: ignore[misc]
        def _bad_event(self, kind: int, error: Exception) -> None:
            assert isinstance(error, Exception)
            bad.append(kind)

        def _around_error(self, kind: int) -> None:
            errors.append(kind)

        def _fail(self, error: Exception) -> None:
            raise AssertionError(error)

    bad: list[int] = []
    errors: list[int] = []
    fresh = create_file(folder, form.MIN_BYTES, "last", "")
    offset = form.STATIC_OFFSET + form.static_bytes(fresh.size)
    slots = (fresh.size - offset) // form.SLOT_BYTES
    writer = Writer(fresh.mapping, offset, slots, ring_core.NO_LIMIT)
    for name, arguments in steps:
        if name == "keep":
            snapshot = native.Snapshot(*arguments)
            reference = writer.keep(snapshot)
            assert writer.keep(snapshot) == reference != NOT_OBSERVED_CODE
        else:
            assert getattr(writer, name)(*arguments) is None
    last(writer)
    ring = read_ring(fresh.path)
    fresh.path.unlink()
    return ring, [*bad, -1, *errors], writer.next


@needs_extension
@given(operations())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_operations_leave_the_same_ring(tmp_path: Path, steps: list[Operation]) -> None:
    plain, compiled = (
        carried_out(base, tmp_path, steps)
        for base in (ring_core.RingCore, native.compiled.RingCore)
    )
    assert plain[1:] == compiled[1:]
    assert plain[0].counters == compiled[0].counters
    assert plain[0].damaged == compiled[0].damaged == 0
    assert blocks(plain[0]) == blocks(compiled[0])


def blocks(ring: Ring) -> dict[str, Any]:
    found = {**ring.events, wire.SNAPSHOT: ring.snapshots}
    return {
        kind: block and (block.scalars.tolist(), block.values.tolist(), block.starts.tolist())
        for kind, block in found.items()
    }


@needs_extension
def test_it_refuses_what_would_leave_the_mapping() -> None:
    mapping = mmap.mmap(-1, form.MIN_BYTES)
    room = (form.MIN_BYTES - form.STATIC_OFFSET) // form.SLOT_BYTES
    for offset, slots in ((form.STATIC_OFFSET, room + 1), (0, 1), (form.MIN_BYTES + 8, 1)):
        with pytest.raises(ValueError, match="do not fit"):
            native.compiled.RingCore(mapping, offset, slots, 1)
    with pytest.raises(BufferError):
        native.compiled.RingCore(b"read only", 0, 1, 1)
    writer = native.compiled.RingCore(mapping, form.STATIC_OFFSET, room, ring_core.NO_LIMIT)
    with pytest.raises(TypeError):
        writer.keep([1, 2])
    with pytest.raises(TypeError):
        writer.write(1)
    with pytest.raises(IndexError):
        native.Snapshot([1, 2], []).scalar(2)


class Meddling:
    """What stands in a batch's field, and calls us while its rows are asked for."""

    def __init__(self, act: Any) -> None:
        self._act = act

    @property
    def shape(self) -> tuple[int, ...]:
        self._act()
        return (3,)


def test_a_look_survives_what_the_fields_of_a_batch_do(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    context = recorder.context
    batch, other = decode_batch(3), decode_batch(4)

    def empty() -> None:
        context.snapshots.forget()
        context.snap(other)
        batch.__dict__.update(positions=None, global_num_tokens_cpu=[1, 2, 3])

    context.snap(batch)
    batch.input_ids = Meddling(empty)
    place = schema.SNAPSHOT.names().index
    taken = context.snap(batch)
    assert taken.scalar(place("input_ids.rows")) == 3
    # What it was when it was looked at, and then what it is.
    assert taken.scalar(place("positions.rows")) == 3
    assert context.snap(batch).scalar(place("positions.rows")) == NONE_CODE
    for name in ("seq_lens", "spec_info", "lora_ids"):
        setattr(batch, name, Meddling(batch.__dict__.clear))
        with contextlib.suppress(Exception):
            context.snap(batch)
        batch = decode_batch(3)
        context.snap(batch)


def test_numbers_no_column_holds_are_not_observed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    snapshot = recorder.context.snap(decode_batch(3, seq_lens_sum=2**70))
    assert snapshot.scalar(schema.SNAPSHOT.names().index("seq_lens_sum")) == NOT_OBSERVED_CODE


@pytest.mark.parametrize("base", [ring_core.RingCore, native.RingCore], ids=["plain", "chosen"])
def test_a_snapshot_too_long_for_the_ring_is_counted(tmp_path: Path, base: Any) -> None:
    values = list(range(40_000))
    scalars = [NONE_CODE] * len(wire.SNAPSHOT_NAMES)
    scalars[wire.ragged(wire.SNAPSHOT)[0]] = len(values)
    ring, _, _ = carried_out(base, tmp_path, [], lambda writer: too_long(writer, scalars, values))
    assert ring.counters["refused"] == 1


def too_long(writer: Any, scalars: list[int], values: list[int]) -> None:
    assert writer.keep(native.Snapshot(scalars, values)) == NOT_OBSERVED_CODE


class Opened:
    """A probe that keeps what it is asked, and opens no event."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def enter(self, *args: Any, **kwargs: Any) -> None:
        self.asked.append((args, kwargs))

    def leave(self, frame: Any, result: Any) -> None:
        raise AssertionError("nothing was opened")


def frames_between(*args: Any, **kwargs: Any) -> list[str]:
    """Names of the functions of Python between this one and the test that has it called."""
    names, frame = [], sys._getframe(1)
    while not frame.f_code.co_name.startswith("test_"):
        names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


@needs_extension
def test_it_stands_in_for_the_function_that_is_registered(tmp_path: Path) -> None:
    recorder, probe = Recorder(tmp_path), Opened()
    hook = Hook(recorder.state, "forward", recorder.writer.hook("forward", "found"))
    hooked = around(hook, probe, recorder.state, never)  # type: ignore[arg-type]
    # As SGLang's registry calls it, which is a function of Python itself.
    assert (lambda *args, **kwargs: hooked(frames_between, *args, **kwargs))(1, a=2) == ["<lambda>"]
    direct = bound(hooked, frames_between)(3, b=4)
    assert direct == ([] if sys.version_info >= (3, 12) else ["one"])
    direct = hooked(frames_between, 5, c=6)
    assert direct == ([] if sys.version_info >= (3, 12) else ["hooked"])
    assert bound(hooked, frames_between)(*(7,), d=8) == []
    asked = [((1,), {"a": 2}), ((3,), {"b": 4}), ((5,), {"c": 6}), ((7,), {"d": 8})]
    assert probe.asked == asked


def test_what_is_bound_is_a_function_like_the_original(recorder: Recorder) -> None:
    hook = Hook(recorder.state, "forward", recorder.writer.hook("forward", "found"))
    hooked = around(hook, Opened(), recorder.state, never)  # type: ignore[arg-type]
    for plain in (hooked, lambda original, *args, **kwargs: original(*args, **kwargs)):
        one: Any = bound(plain, decode_batch)
        assert inspect.isfunction(one)
        assert one.__wrapped__ is decode_batch
        assert (one.__name__, one.__module__) == ("decode_batch", decode_batch.__module__)
        assert inspect.signature(one) == inspect.signature(decode_batch)
        assert one(4).batch_size == one(rows=4).batch_size == 4
        holder = type("Holder", (), {"method": bound(plain, lambda self, x: (self, x))})()
        assert holder.method(3) == (holder, 3)


@needs_extension
def test_packed_arguments_are_those_of_the_call(recorder: Recorder) -> None:
    hook = Hook(recorder.state, "forward", recorder.writer.hook("forward", "found"))
    call = native.compiled.Call(hook, recorder.state, None, None, None, True)

    def told(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    for by_position in (0, 3, 15, 16, 17, 300):
        for named in (0, 1, 16, 17, 300):
            args = tuple(range(by_position))
            kwargs = {f"name_{number}": number for number in range(named)}
            assert call.packed(told, args, kwargs) == (args, kwargs)
    for wrong in ((told,), (told, [], {}), (told, (), None)):
        with pytest.raises(TypeError, match="a tuple and a dict"):
            call.packed(*wrong)


@needs_extension
def test_it_stands_in_for_nothing_else() -> None:
    plain = frames_between.__class__(frames_between.__code__, globals())
    assert native.compiled.stand_in(plain) is False
    assert native.compiled.stand_in(len) is False
    call = 3
    assert native.compiled.stand_in(lambda: call) is False


def test_a_hook_called_without_an_original_says_so(recorder: Recorder) -> None:
    hook = Hook(recorder.state, "forward", recorder.writer.hook("forward", "found"))
    hooked: Any = watching(hook, recorder.state, never)
    for call in (lambda: hooked(), lambda: hooked(*())):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'original'"):
            call()
    assert hooked(len, [1, 2]) == 2


@pytest.mark.parametrize("count", [0, 3, 15, 16, 17, 40])
def test_a_watch_is_told_the_result_and_any_number_of_arguments(
    recorder: Recorder, count: int
) -> None:
    told: list[Any] = []
    hook = Hook(recorder.state, "steps", recorder.writer.hook("steps", "found"))
    hooked = watching(
        hook, recorder.state, never, after=lambda *args, **kwargs: told.append((args, kwargs))
    )
    numbers = tuple(range(count))
    named = {f"name_{number}": number for number in range(0, count, 2)}
    assert hooked(lambda *args, **kwargs: len(args), *numbers, **named) == count
    assert told == [((count, *numbers), named)]


def test_arguments_are_found_by_names_that_are_other_strings(recorder: Recorder) -> None:
    hooked = recorder.hook(ForwardProbe(recorder.context, lambda: None, print, None), lambda **_: 1)
    batch, runner = decode_batch(), ModelRunner()
    names = ["".join(("forward", "_batch")), "".join(("se", "lf")), "".join(("not", " asked"))]
    assert hooked(**dict(zip(names, (batch, runner, None), strict=True))) == 1
    assert len(recorder.events("forward")) == 1


@needs_extension
def test_a_build_for_another_layout_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_LAYOUT", (0,))
    assert native._compiled() == (
        None,
        "the extension is of another version; install padtrace again",
    )


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@needs_extension
def test_the_thread_ahead_of_the_writer_changes_nothing_and_ends(tmp_path: Path) -> None:
    before = threads()
    writer = EventWriter.create(tmp_path, size_bytes=form.MIN_BYTES)
    assert writer.run_ahead(True)
    assert writer.run_ahead(True)  # once is enough
    assert threads() == before + 1
    events = [(wire.kind_index("ready"), [number] * 15) for number in range(3000)]
    for number, event in enumerate(events):
        writer.write(*event)
        if number % 500 == 0:
            time.sleep(0.03)
    writer.close()
    assert threads() == before
    ring = read_ring(writer.path)
    block = ring.events["ready"]
    assert block is not None
    assert ring.damaged == 0
    # The newest ones: the ring is smaller than what was written, so it went round.
    numbers = block.scalars[:, 0].tolist()
    assert numbers == list(range(3000 - len(numbers), 3000))
    assert 100 < len(numbers) < 3000


@needs_extension
def test_a_child_made_by_fork_has_no_thread_to_wait_for(tmp_path: Path) -> None:
    writer = EventWriter.create(tmp_path, size_bytes=form.MIN_BYTES)
    assert writer.run_ahead(True)
    child = os.fork()
    if child == 0:
        writer.run_ahead(False)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not writer.run_ahead(False)
