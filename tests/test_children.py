"""Starting, watching and ending a process: nothing of it stays, nothing it says is lost."""

from __future__ import annotations

import os
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path

import pytest

from padtrace import children
from padtrace.children import Child, Lines, Log, Pipes
from padtrace.errors import EnvironmentMissingError, UsageError

# A process with a child and a grandchild, one of them in a process group of its own; each tells its
# number and takes no SIGTERM.
FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for generation in range(2):
    if os.fork():
        break
else:
    generation = 2
if generation == 1:
    os.setpgid(0, 0)
os.write(1, f"{os.getpid()}\\n".encode())
THEN
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that private folders are made in."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def numbers(log: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 30
    while len(lines := log.read_text().split()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(line) for line in lines]


def test_its_folder_is_private_and_goes_with_it(temp: Path) -> None:
    code, output, _ = children.answer(python("import os; print(os.getcwd())"), 30)
    assert code == 0
    assert Path(output.decode().strip()).parent == temp
    with Child(python("import time; time.sleep(600)")):
        (folder,) = temp.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IRWXU
    assert list(temp.iterdir()) == []


@pytest.mark.parametrize("session", [True, False])
def test_what_it_started_ends_with_it(tmp_path: Path, session: bool) -> None:
    log = tmp_path / "log"
    command = python(FAMILY.replace("THEN", ""))
    with Child(command, streams=Log(log), session=session) as child:
        pids = numbers(log, 3)
        assert sorted([child.pid, *child.others()]) == sorted(pids)
        assert child.end(grace=0.2) == 128 + signal.SIGKILL
    # What is no child of ours was killed, and on a busy machine takes its time to go.
    deadline = time.monotonic() + 30
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if is_there(pid)] == []
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)  # no zombie is left to wait for


def test_in_a_session_what_outlived_it_ends_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = python(FAMILY.replace("THEN", "if generation == 0: os._exit(3)"))
    with Child(command, streams=Log(log), session=True) as child:
        assert child.wait(30) == 3
        first, *others = numbers(log, 3)
        assert {*child.others()} == {first, *others} - {child.pid}
    assert [pid for pid in (first, *others) if is_there(pid)] == []


def test_it_may_end_by_itself_then_by_a_signal_then_it_must() -> None:
    asked = Child(python("input()"), streams=Pipes())
    asked.incoming.write(b"go\n")
    asked.incoming.close()
    assert asked.end(patience=30) == 0
    assert asked.killed_by is None
    with Child(python("import time; time.sleep(600)")) as told:
        assert told.end(grace=30) == 128 + signal.SIGTERM
        assert told.killed_by == signal.SIGTERM
    assert told.end() == 128 + signal.SIGTERM  # once more changes nothing


def test_a_wait_that_is_too_long_ends() -> None:
    code, output, why = children.answer(python("import time; time.sleep(600)"), 0.3)
    assert (code, output, why) == (128 + signal.SIGKILL, b"", "no answer within 0.3 seconds")


def test_last_words_are_the_last_lines_of_stderr() -> None:
    wordy = "import sys; [print(i, file=sys.stderr) for i in range(200_000)]; print('out')"
    code, output, words = children.answer(python(wordy), 60)
    assert (code, output, words) == (0, b"out\n", "199997 | 199998 | 199999")


@pytest.mark.parametrize("kind", ["pipe", "log"])
def test_every_line_comes_in_order_whatever_its_reader_does(tmp_path: Path, kind: str) -> None:
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        raise OSError("a reader's own trouble")

    code = (
        "import os\n"
        "for i in range(20_000): os.write(1 + i % 2, f'line {i}\\n'.encode())\n"
        "os.write(1, 'an ö in '.encode()[:4]); os.write(1, 'an ö in two, no end'.encode()[4:])\n"
    )
    streams = Lines(on_line) if kind == "pipe" else Log(tmp_path / "log", on_line)
    with Child(python(code), streams=streams) as child:
        assert child.wait(60) == 0
    assert lines == [*(f"line {i}" for i in range(20_000)), "an ö in two, no end"]


def test_a_line_without_end_is_passed_on_in_parts(tmp_path: Path) -> None:
    lines: list[str] = []
    code = f"import os; os.write(1, b'x' * {5 << 20})"
    with Child(python(code), streams=Log(tmp_path / "log", lines.append)) as child:
        assert child.wait(60) == 0
    assert len(lines) > 1
    assert sum(map(len, lines)) == 5 << 20


def test_a_log_that_was_emptied_is_followed_on(tmp_path: Path) -> None:
    lines: list[str] = []
    log = tmp_path / "log"
    code = (
        "import os, time\n"
        "print('first ' * 100, flush=True)\n"
        f"while os.stat({str(log)!r}).st_size: time.sleep(0.01)\n"
        "print('second', flush=True)\n"
    )
    with Child(python(code), streams=Log(log, lines.append)) as child:
        deadline = time.monotonic() + 30
        while not lines:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.truncate(log, 0)
        assert child.wait(30) == 0
    assert lines == ["first " * 100, "second"]


def test_a_log_is_its_owner_s_alone(tmp_path: Path) -> None:
    with Child(python("print('a prompt')"), streams=Log(tmp_path / "log")) as child:
        child.wait()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR
    assert (tmp_path / "log").read_text() == "a prompt\n"


def test_what_cannot_be_started_is_named_and_leaves_nothing(temp: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    for program in ("/no/such/python", str(tmp_path / "text")):
        with pytest.raises(EnvironmentMissingError, match=f"cannot start {program}"):
            Child([program])
    with pytest.raises(UsageError, match="cannot write the log"):
        Child(python(""), streams=Log(tmp_path / "no" / "log"))
    assert list(temp.iterdir()) == []


def test_a_relative_program_is_one_of_the_caller_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").symlink_to("/bin/sh")
    monkeypatch.chdir(tmp_path)
    assert children.answer(["./here", "-c", "echo well"], 30)[:2] == (0, b"well\n")


def test_interpreters_import_from_nowhere_else() -> None:
    base = {"PYTHONPATH": "theirs", "HOME": "/h"}
    assert children.python_environment(base) == {"HOME": "/h", "PYTHONSAFEPATH": "1"}
    ours = children.python_environment(base, Path("/a"), Path("/b"))
    assert ours["PYTHONPATH"] == f"/a{os.pathsep}/b"
    assert base["PYTHONPATH"] == "theirs"
    # What such an interpreter starts itself, without -P, does the same.
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(sys.flags.safe_path)'])"  # noqa: E501
    environment = children.python_environment(os.environ)
    _, output, _ = children.answer(
        children.python_command(sys.executable, "-c", code), 30, environment=environment
    )
    assert output == b"True\n"
