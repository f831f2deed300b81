"""Waiting for a server and reading its death, with small stand-in processes instead of SGLang."""

import sys
import time
from pathlib import Path

import pytest

from padtrace.children import Child, Log
from padtrace.lab.environment import LabSetup
from padtrace.lab.launcher import LabServer, LabServerError, reason_of_death, wait_until_ready

# Shortened from the log of a real 0.5.18 server (tp 4, dp 2, EAGLE) that died of sglang#30296.
CRASH_LOG = """\
padtrace lab: process 13139: process, communication
[2026-11-29 17:55:44 DP0 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "sglang/srt/managers/scheduler.py", line 4915, in dispatch_event_loop
    scheduler.event_loop_normal()
RuntimeError: num_splits must have shape (b+1)

[2026-11-29 17:55:47] Subprocess scheduler_0 (pid=13127) crashed with exit code -9.
requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('closed'))
"""

SETUP = LabSetup(model="dense", root=None, tp=1, dp=1, port=1)


def process_that(code: str, log: Path) -> Child:
    return Child([sys.executable, "-c", code], streams=Log(log))


def test_ready_once_the_log_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import time; print('The server is fired up and ready to roll!', flush=True);time.sleep(60)"
    )
    process = process_that(code, log)
    try:
        assert wait_until_ready(process, log, timeout=30).state == "ready"
    finally:
        process.end()


def test_died_when_the_process_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "print('padtrace lab: process 1: process'); print('ValueError: no such backend')"
    outcome = wait_until_ready(process_that(code, log), log, timeout=30)
    assert (outcome.state, outcome.reason) == ("died", "ValueError: no such backend")


def test_timeout_is_no_death(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = process_that("import time; time.sleep(60)", log)
    try:
        assert wait_until_ready(process, log, timeout=0.3).state == "timeout"
    finally:
        process.end()


def test_reason_is_the_schedulers_error_and_not_what_follows_from_it() -> None:
    assert reason_of_death(CRASH_LOG) == "RuntimeError: num_splits must have shape (b+1)"


def test_reason_of_a_refused_argument_is_the_last_line() -> None:
    refusal = "launch_server.py: error: argument --attention-backend: invalid choice: 'nonsense'"
    assert (
        reason_of_death(f"padtrace lab: process 7: process\nusage: ...\n{refusal}\n\n") == refusal
    )


def test_reason_is_not_the_loss_of_a_crashed_peer() -> None:
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"
    log = CRASH_LOG.replace("RuntimeError: num", f"{lost}\nRuntimeError: num")
    assert reason_of_death(log) == "RuntimeError: num_splits must have shape (b+1)"


def test_reason_says_when_the_stand_ins_never_loaded() -> None:
    log = CRASH_LOG.split("\n", 1)[1]
    assert "padtrace is not installed" in reason_of_death(log)


def test_reason_names_a_stand_in_that_found_no_target() -> None:
    line = "padtrace lab: stand-ins not installed: LookupError('no Indexer')"
    assert reason_of_death(f"{line}\nEOFError\n") == line


def test_request_to_nobody_tells_why(tmp_path: Path) -> None:
    server = LabServer(SETUP, log_path=tmp_path / "log")
    server.command = [sys.executable, "-c", "print('padtrace lab: process'); print('OSError: x')"]
    with server:
        server.process.wait()
        with pytest.raises(LabServerError, match="OSError: x"):
            server.request([1, 2, 3], timeout=5)


def test_stop_ends_the_whole_group(tmp_path: Path) -> None:
    server = LabServer(SETUP, log_path=tmp_path / "log")
    child = "import os, time; os.fork(); print(os.getpid(), flush=True); time.sleep(60)"
    server.command = [sys.executable, "-c", child]
    with server:
        while len(pids := (tmp_path / "log").read_text().split()) < 2:
            assert server.process.poll() is None
    # Killed, but only the first of them is waited for: the kernel may take a moment.
    deadline = time.monotonic() + 10
    while any(is_running(int(pid)) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # killed and waiting to be reaped by its adopter


def test_a_server_that_was_never_started_has_no_process(tmp_path: Path) -> None:
    with pytest.raises(LabServerError, match="not started"):
        _ = LabServer(SETUP, log_path=tmp_path / "log").process
