"""A lab server recorded without the launcher: a variable, the server as usual, `padtrace seal`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from padtrace.errors import BadRecordingError
from padtrace.lab.environment import LabSetup, free_port
from padtrace.lab.launcher import LabServer
from padtrace.record.ring_reader import read_header
from padtrace.record.ring_search import rings_in
from padtrace.recording.model import Recording
from padtrace.recording.reader import read
from padtrace.replay import releases
from tests.live import servers

DENSE: dict[str, Any] = {"model": "dense", "tp": 2, "dp": 2}
DSA: dict[str, Any] = {"model": "dsa", "tp": 2, "dp": 2, "extra": servers.EAGLE}


@contextmanager
def serving(
    folder: Path, rings: Path, setup: dict[str, Any], release: str = "0.5.18", **variables: str
) -> Iterator[LabServer]:
    """A server that is ready; ended with all its processes when the block is left."""
    root = releases.here(servers.need_release(release))
    given = {"PADTRACE_RECORD": str(rings), "PADTRACE_RING": "1M", **variables}
    lab = LabSetup(root=root, port=free_port(), **setup)
    with LabServer(lab, log_path=folder / "server.log", extra_environment=given) as server:
        outcome = server.wait_until_ready(servers.START_SECONDS)
        assert outcome.state == "ready", log_of(server)[-5000:]
        yield server


def log_of(server: LabServer) -> str:
    return server.log_path.read_text(errors="replace")


def lines_of(server: LabServer, words: str) -> list[str]:
    return [line for line in log_of(server).splitlines() if words in line]


def answered(server: LabServer, prompts: Sequence[int] = (3, 17, 1), new_tokens: int = 8) -> None:
    """Requests to each data-parallel rank in turn; each must get all its tokens."""
    for tokens in prompts:
        answer = server.request(range(5, 5 + tokens), max_new_tokens=new_tokens)
        assert len(answer["output_ids"]) == new_tokens


def forwards(rings: Path) -> dict[int, int]:
    """Forwards so far by process id, from the headers of the rings."""
    counts = {}
    for path in rings_in(rings):
        try:
            header, counters = read_header(path)
        except BadRecordingError:  # in the making
            continue
        counts[header.pid] = counters["forwards"]
    return counts


def seal(folder: Path, *rings: Path) -> tuple[Recording, dict[str, Any]]:
    """`padtrace seal` as a user runs it; the recording and what the command said."""
    out = folder / "sealed.safetensors"
    command = [sys.executable, "-m", "padtrace", "seal", *map(str, rings), "-o", str(out)]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return read(out), said
