"""A whole lab server where modules are planted: it serves, and none of them is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from padtrace.recording.reader import read
from padtrace.replay import releases
from tests.live import servers
from tests.test_planted_modules import RELEASE, Trap

pytestmark = pytest.mark.live


def test_nothing_that_lies_around_runs_in_a_lab_server(tmp_path: Path) -> None:
    servers.need_release(RELEASE)
    place = releases.here(RELEASE)
    assert place is not None
    trap = Trap(tmp_path / "trap")
    trap.set()
    server = servers.start(
        tmp_path / "out",
        RELEASE,
        model="dense",
        tp=2,
        environment=trap.environment(PADTRACE_RELEASES=str(place.parent)),
        cwd=trap.work,
        dp=2,
    )
    try:
        server.wait_until_ready()
        server.ask([5, 17])
        server.interrupt()
    finally:
        servers.end(server)
    assert len(server.answers) == 2
    assert read(server.recording).rows("process") == 2
    assert list((trap.root / "marks").iterdir()) == []
