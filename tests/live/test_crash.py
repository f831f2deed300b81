"""sglang#30296, live: the server dies by itself, and its recording says why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from padtrace.contracts.engine import check
from padtrace.recording.model import Recording
from padtrace.recording.reader import read
from tests.live import servers
from tests.live.servers import LiveServer

pytestmark = [pytest.mark.live, pytest.mark.live_default]
WORDS = "num_splits must have shape (b+1)"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("crash")
    secret = "sk-padtrace-test-0123456789abcdef"
    server = servers.start(
        folder,
        "0.5.18",
        tp=4,
        dp=2,
        server_arguments=[*servers.EAGLE, f"--api-key={secret}"],
    )
    try:
        server.wait(servers.START_SECONDS)
        yield server
    finally:
        servers.end(server)


@pytest.fixture(scope="module")
def recording(crashed: LiveServer) -> Recording:
    return read(crashed.recording)


def test_the_server_died_of_it(crashed: LiveServer) -> None:
    assert f"RuntimeError: {WORDS}" in crashed.log
    assert crashed.process.returncode not in (0, 1, 2, 3, 4, 5)


def test_every_rank_is_there_up_to_the_failing_launch(recording: Recording) -> None:
    assert recording.rows("process") == 4
    for process in range(4):
        kinds = [event.kind for event in recording.events(process=process)]
        after_last_plan = kinds[len(kinds) - kinds[::-1].index("plan") :]
        assert "pad" in after_last_plan, "the draft decode was planned before its pad"
    errors = [event for event in recording.events() if event.kind == "error"]
    assert errors
    assert all(event["message"] == WORDS for event in errors)
    assert any(event["function"] == "flash_mla_with_kvcache" for event in errors)


def test_it_names_the_draft_decode_planned_before_the_pad(recording: Recording) -> None:
    findings = [f for f in check(recording).findings if f.contract == "PT101"]
    assert {finding.planned for finding in findings} == {"before the pad"}
    assert {finding.worker for finding in findings} == {"draft"}
    assert {f.left.value for f in findings} == {2}
    assert {f.right.value for f in findings} == {2}
    assert {f.right.expected for f in findings} == {3}
    assert all("sglang#30296" in finding.known_reports for finding in findings)


def test_the_diagnosis_needs_neither_torch_nor_sglang(crashed: LiveServer) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\n"
        "from padtrace.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "diff", str(crashed.recording)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    first = " ".join(done.stdout.split())
    assert first.startswith("num_splits 2, needs 3: the FlashMLA metadata of DECODE (draft worker)")


def test_the_alarm_speaks_before_the_kernel(crashed: LiveServer) -> None:
    alarm = crashed.log.find("padtrace alarm:")
    assert 0 <= alarm < crashed.log.find(f"RuntimeError: {WORDS}")
    line = crashed.log[alarm:].splitlines()[0]
    assert "init_forward_metadata planned" in line
    assert "prepare_mlp_sync_batch" in line


def test_the_command_says_where_the_recording_is(crashed: LiveServer) -> None:
    assert f"padtrace diff {crashed.recording}" in crashed.log


def test_no_secret_is_in_a_byte_of_it(crashed: LiveServer) -> None:
    assert b"padtrace-test-0123456789abcdef" not in crashed.recording.read_bytes()
