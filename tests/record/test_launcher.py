"""`padtrace record` around a stand-in server: exit codes, signals, one file, no secret in it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from padtrace.errors import EnvironmentMissingError, NothingObservedError, UsageError
from padtrace.record import attach, launcher, shared_memory
from padtrace.record.launcher import (
    Callbacks,
    FirstError,
    RecordResult,
    StopAfter,
    parse_server_arguments,
    parse_stop_after,
    run_record,
)
from padtrace.record.ring_search import rings_in
from padtrace.record.settings import VARIABLES
from padtrace.record.status import Status
from padtrace.recording import reader
from tests.disks import mounted

ROOT = Path(__file__).resolve().parents[2]
KEY = "correct-horse-7"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which `python -m sglang.launch_server` is the stand-in."""
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("")
    code = "from tests.record.fake_server import main\nmain()\n"
    (site / "sglang" / "launch_server.py").write_text(code)
    info = site / "padtrace-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: padtrace\nVersion: 0\n")
    points = "[sglang.srt.plugins]\npadtrace = padtrace.record.plugin:register\n"
    (info / "entry_points.txt").write_text(points)
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return {**kept, "PYTHONPATH": f"{site}:{ROOT}"}


class Run:
    """One `run_record`, and what it told on the way."""

    def __init__(self, out: Path, environment: dict[str, str]) -> None:
        self.out, self.environment = out, environment
        self.lines: list[str] = []
        self.states: list[Status] = []
        self.errors: list[FirstError] = []

    def __call__(self, behave: str, **options: object) -> RecordResult:
        return run_record(
            ["--model-path", "org/Tiny-DSA", "--behave", behave, "--api-key", KEY],
            out=self.out,
            ring_bytes=4 << 20,
            environment=self.environment,
            poll_seconds=0.05,
            callbacks=Callbacks(self.lines.append, self.states.append, self.errors.append),
            **options,  # type: ignore[arg-type]
        )

    def when_forwards(self, number: int, *signals: int) -> None:
        """Send signals to this process once the server has made some forwards."""

        def wait() -> None:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                if self.states and self.states[-1].forwards >= number:
                    for one in signals:
                        os.kill(os.getpid(), one)
                        time.sleep(0.3)
                    return
                time.sleep(0.02)

        threading.Thread(target=wait, daemon=True).start()


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Run:
    return Run(tmp_path / "out", environment)


def files(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def test_a_clean_end(run: Run) -> None:
    result = run("clean")
    assert (result.exit_code, result.problem, result.rings) == (0, None, None)
    assert result.recording is not None
    assert files(run.out) == [result.recording.name]
    assert result.recording.name.endswith("-Tiny-DSA.safetensors")
    assert str(result.recording) in result.next_command
    recording = reader.read(result.recording)
    assert recording.rows("forward") == 2 * 5
    assert recording.table("process").column("complete").tolist() == [1, 1]
    assert recording.about["exit_code"] == 0
    assert "--behave '[not recorded]'" in recording.about["command"]
    assert run.lines == ["plugins: None", "ready"]
    last = run.states[-1]
    assert (last.ranks, last.expected_ranks, last.forwards) == ((0, 1), 2, 5)


@pytest.mark.parametrize("behave", ["clean", "killed"])
def test_rings_that_cannot_stay_on_their_disk_are_recorded_and_removed(
    run: Run, tmp_path: Path, behave: str
) -> None:
    shared = set(shared_memory.ROOT.glob("padtrace-*"))
    with mounted("btrfs", tmp_path / "disks") as disk:
        result = run(behave, rings=disk)
        assert list(disk.iterdir()) == []
    assert (result.problem, result.rings) == (None, None)
    assert result.recording is not None
    coverage = reader.read(result.recording).coverage
    assert set(coverage["in_shared_memory"]) == {"0", "1"}
    assert run.states[-1].processes == 2
    assert set(shared_memory.ROOT.glob("padtrace-*")) <= shared


def test_the_key_is_in_no_byte(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "remove_folder", lambda folder: None)
    result = run("clean")
    assert result.recording is not None
    rings = [ring for folder in run.out.glob(".rings-*") for ring in rings_in(folder)]
    assert len(rings) == 2
    for path in (*rings, result.recording):
        assert KEY.encode() not in path.read_bytes()
    assert b"[not recorded]" in rings[0].read_bytes()
    assert "[not recorded]" in reader.read(result.recording).about["command"]


def test_a_killed_server_seals_and_returns_its_signal(run: Run) -> None:
    result = run("killed")
    assert result.exit_code == 128 + signal.SIGKILL
    assert result.recording is not None
    assert reader.read(result.recording).rows("process") == 2


def test_processes_the_server_leaves_are_waited_for(run: Run) -> None:
    result = run("orphans")
    assert result.exit_code == 5
    assert result.recording is not None
    assert reader.read(result.recording).rows("forward") == 2 * 5


def test_nothing_recorded_is_said_and_the_code_is_the_server_s(run: Run) -> None:
    result = run("nothing")
    assert (result.exit_code, result.recording, result.rings) == (3, None, None)
    assert isinstance(result.problem, NothingObservedError)
    assert files(run.out) == []


def test_ctrl_c_is_forwarded(run: Run) -> None:
    handler = signal.getsignal(signal.SIGINT)
    run.when_forwards(3, signal.SIGINT)
    result = run("serve")
    assert result.exit_code == 7
    assert result.recording is not None
    assert reader.read(result.recording).rows("forward") >= 2 * 3
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_second_ctrl_c_kills(run: Run) -> None:
    run.when_forwards(3, signal.SIGINT, signal.SIGINT)
    result = run("stubborn")
    assert result.exit_code == 128 + signal.SIGKILL
    assert result.recording is not None


def test_stop_after_forwards(run: Run) -> None:
    result = run("serve", stop_after=StopAfter(forwards=20))
    assert result.exit_code == 7
    assert result.recording is not None
    assert reader.read(result.recording).rows("forward") >= 20


def test_stop_after_a_time(run: Run) -> None:
    started = time.monotonic()
    result = run("serve", stop_after=StopAfter(seconds=1.5))
    assert time.monotonic() - started >= 1.5
    # It was asked to end, which this one takes for Ctrl-C, and not killed.
    assert result.exit_code == 7
    assert result.recording is not None


def test_the_first_error_is_sealed_at_once(run: Run) -> None:
    at_error: list[int] = []

    def first_error(found: FirstError) -> None:
        run.errors.append(found)
        at_error.append(reader.read(found.recording).rows("error"))

    callbacks = Callbacks(run.lines.append, None, first_error)
    result = run_record(
        ["--behave", "error", KEY],
        out=run.out,
        environment=run.environment,
        ring_bytes=4 << 20,
        until_error=True,
        poll_seconds=0.05,
        callbacks=callbacks,
    )
    assert at_error == [1]
    assert result.first_error == run.errors[0]
    # Poll, seal and write; the server would have slept for a minute.
    assert run.errors[0].seconds < 20
    assert result.exit_code == 7
    assert files(run.out) == [run.errors[0].recording.name]


def test_a_list_of_plugins_gets_this_one(run: Run) -> None:
    run.environment["SGLANG_PLUGINS"] = "other"
    run("nothing")
    assert run.lines[0] == "plugins: other,padtrace"


def test_an_existing_file_is_not_overwritten(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.time, "strftime", lambda _: "20250101-000000")
    first, second = run("clean"), run("clean")
    assert first.recording != second.recording
    assert len(files(run.out)) == 2


def test_a_damaged_ring_keeps_the_folder(run: Run) -> None:
    def spoil(found: Status) -> None:
        for folder in run.out.glob(".rings-*"):
            (folder / "spoiled.ring").write_bytes(b"x")

    result = run_record(
        ["--behave", "clean", KEY],
        out=run.out,
        environment=run.environment,
        ring_bytes=4 << 20,
        poll_seconds=0.05,
        callbacks=Callbacks(None, spoil, None),
    )
    assert result.recording is not None
    assert result.rings is not None
    assert result.rings.is_dir()


@pytest.mark.parametrize("missing", ["sglang", "padtrace"])
def test_what_is_not_installed_is_named(
    tmp_path: Path, environment: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout's folder may hold metadata of an editable install
    # An interpreter without its own packages, so that only the folder made here counts.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    site = tmp_path / "site"
    if missing == "sglang":
        (site / "sglang").rename(site / "other")
    else:
        (site / "padtrace-0.dist-info").rename(site / "other")
    bare = {**environment, "PYTHONPATH": str(site)}
    with pytest.raises(EnvironmentMissingError) as caught:
        run_record([], out=tmp_path / "out", environment=bare, python=str(python))
    assert missing in str(caught.value).lower().partition("\n")[0]
    assert not (tmp_path / "out").exists()


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissingError):
        run_record([], out=tmp_path / "out", environment={}, python="/no/such/python")


def test_an_out_folder_that_cannot_be(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        run_record([], out=Path("/proc/none"), environment=environment)


def test_settings_are_checked_before_the_server_starts(run: Run) -> None:
    with pytest.raises(UsageError, match="setting"):
        run("clean", tier="everything")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500", StopAfter(forwards=500)),
        ("90s", StopAfter(seconds=90)),
        ("2h", StopAfter(seconds=7200)),
    ],
)
def test_stop_after_is_understood(text: str, expected: StopAfter) -> None:
    assert parse_stop_after(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "5x", "1.5s"])
def test_stop_after_that_makes_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        parse_stop_after(text)


def test_server_arguments_are_split_as_a_shell_would() -> None:
    assert parse_server_arguments("--a 'b c' --d=\"e\"") == ["--a", "b c", "--d=e"]
    with pytest.raises(UsageError):
        parse_server_arguments("--a 'b")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--model-path", "/data/hub/models--org--Big-One/snapshots/0123abc/"], "Big-One"),
        (["--model=/models/x y/"], "x-y"),
        (["--served-model-name", "chat", "--model", "z"], "chat"),
        ([], "server"),
    ],
)
def test_the_file_is_named_after_the_model(arguments: list[str], name: str) -> None:
    assert launcher._model_name(arguments) == name


@pytest.mark.parametrize("kind", attach.KINDS)
def test_attach_lines_name_the_variable_and_the_seal(kind: str) -> None:
    text = attach.attach_config(kind)
    assert "PADTRACE_RECORD" in text
    assert "padtrace seal" in text
    with pytest.raises(UsageError):
        attach.attach_config("podman?")
