"""The child process: signals reach it whatever started us."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from padtrace.children import Lines
from padtrace.record.server_process import ServerProcess

ASK = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


@pytest.fixture
def ignored_interrupt() -> Iterator[None]:
    """As in a background job of a shell, or under nohup."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_server_started_in_the_background_can_be_interrupted(ignored_interrupt: None) -> None:
    lines: list[str] = []
    server = ServerProcess([sys.executable, "-c", ASK], os.environ, Lines(lines.append), None)
    assert server.wait(30) == 0
    server.finish()
    assert lines == ["True"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
