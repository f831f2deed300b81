"""Names and errors on the command line and in the server's log are lines of plain characters."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from padtrace.one_line import is_plain, one_line
from padtrace.record.alarm import Alarm
from padtrace.record.plain_log import MAX_LOG_LINE, OneLine, make_plain
from padtrace.recording import writer
from tests.record.standins import Recorder
from tests.recording.helpers import small_recording

HOSTILE = "a\x1b]0;t\x07\x1b[31m[red]\n\x7f\x9b1m\u202e\u2066b"


def _run(*arguments: str | bytes, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "padtrace", *arguments],
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
    )
    # As a terminal gets it: a lone byte that is no UTF-8 would be a control of eight bits.
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def is_clean(text: str) -> bool:
    return all(character == "\n" or is_plain(character) for character in text)


@pytest.mark.parametrize("command", ["info", "check", "diff", "show", "ranks", "replay", "across"])
def test_a_hostile_file_name_is_refused_on_lines_of_its_own(tmp_path: Path, command: str) -> None:
    path = tmp_path / f"{HOSTILE}.safetensors"
    path.write_bytes(b"no recording")
    code, out, err = _run(command, str(path))
    assert (code, out) == (3, "")
    assert is_clean(err)
    assert err.splitlines()[0] == f"padtrace: bad recording: {one_line(path.name)}"
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_hostile_file_name_is_told_in_plain_characters(tmp_path: Path, more: list[str]) -> None:
    path = tmp_path / f"{HOSTILE}.safetensors"
    writer.write(small_recording(), path)
    for command in ("info", "check"):
        code, out, err = _run(command, str(path), *more)
        assert code in (0, 1, 5), err
        assert is_clean(out + err)
        if more and command == "info":
            assert json.loads(out)["path"] == str(path)


def test_a_file_name_that_is_no_utf8_is_told_and_is_json(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/r\xe9c\x9b.safetensors"
    with open(path, "wb") as file:
        file.write(writer.to_bytes(small_recording()))
    code, out, _ = _run("info", path)
    assert code == 0
    assert "r\\udce9c\\udc9b.safetensors" in out
    code, out, _ = _run("info", path, "--json")
    assert code == 0
    assert json.loads(out)["path"] == os.fsdecode(path)


def test_a_terminal_that_lacks_the_letters_gets_escapes(tmp_path: Path) -> None:
    path = tmp_path / "größe.safetensors"
    writer.write(small_recording(), path)
    code, out, err = _run("info", str(path), PYTHONIOENCODING="ascii")
    assert code == 0, err
    assert "gr\\xf6\\xdfe.safetensors" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", HOSTILE),
        ("check", str(Path("recordings") / "crash.safetensors"), "--only", HOSTILE),
        ("releases", "verify", HOSTILE),
        ("make", HOSTILE, "-o", "x"),
        ("seal", HOSTILE, "-o", "x"),
        ("doctor", "--sglang", HOSTILE),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_hostile_argument_is_refused_in_plain_characters(arguments: tuple[str, ...]) -> None:
    code, _, err = _run(*arguments)
    assert code in (2, 3, 4, 5)
    assert is_clean(err)
    assert err.startswith("padtrace: ")
    assert len(err.splitlines()) <= 3


def test_the_lines_of_the_alarm_are_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path)
    alarm = Alarm(recorder.state, f"/rings{HOSTILE}")
    record = recorder.state.new_record(recorder.state.draft)
    record.planned(f"Backend{HOSTILE}", 1, 1, 2)
    record.padded(f"pad{HOSTILE}", 2, 1, 2)
    alarm.launch(f"flash_mla{HOSTILE}", record, 2, 2)
    alarm.failed(f"function{HOSTILE}", recorder.state.new_record(recorder.state.draft))
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2
    for line in lines:
        assert is_clean(line)
        assert "\n" not in line
        assert f"padtrace seal /rings{one_line(HOSTILE)}" in line
    assert f"flash_mla{one_line(HOSTILE)} gets q with 2 rows" in lines[0]


def test_every_line_of_the_logger_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("padtrace.test_one_line")
    make_plain(logger)
    make_plain(logger)
    logger.warning("padtrace: %s: %s", "off", HOSTILE)
    logger.warning("padtrace: %s", "x" * 99_999)
    first, second = (r.getMessage() for r in caplog.records)
    assert first == f"padtrace: off: {one_line(HOSTILE)}"
    assert len(second) == MAX_LOG_LINE
    # One that cannot be formed is the handler's to report, and not ours to raise or to drop.
    wrong = logging.makeLogRecord({"msg": "percent %d", "args": ("no number",)})
    assert OneLine().filter(wrong)
    assert wrong.msg == "percent %d"
