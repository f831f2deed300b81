"""SIGKILL of `padtrace record`: the server goes on as if nothing were, and its rings are sealed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from padtrace.record.launcher import LOG_NAME
from padtrace.record.seal import seal
from padtrace.record.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
LINES = 50_000  # about a megabyte, many times what a pipe holds
FORWARDS = 40

# Records forwards and prints, waits to be told that the launcher is gone, does so again, ends well.
SERVER = f"""
import os, sys, time
from pathlib import Path
from padtrace.record import settings
from padtrace.record.ring import EventWriter
from tests.record.made_events import MadeRank, rank_facts

here = Path(sys.argv[-1])
found = settings.from_environment(os.environ)
writer = EventWriter.create(
    found.folder, size_bytes=found.ring_bytes, policy=found.policy, run=found.run
)
writer.facts(rank_facts(tp_rank=0, tp_size=1, dp_size=1))
forwards = MadeRank(writer, dp_rank=0, attn_tp=1).forwards({2 * FORWARDS})
for number in forwards:
    if number == {FORWARDS}:
        break
print("ready", flush=True)
(here / "ready").touch()
while not (here / "go").exists():
    time.sleep(0.01)
for line in range({LINES}):
    print("line", line, file=sys.stderr if line % 2 else sys.stdout, flush=True)
for number in forwards:
    pass
writer.close()
print("the last line", flush=True)
(here / "ending").write_text("well")
(here / "ending").rename(here / "ended")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an `sglang.launch_server` that is the script above, and padtrace's plugin."""
    folder = tmp_path / "site"
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text("")
    (folder / "sglang" / "launch_server.py").write_text(SERVER)
    info = folder / "padtrace-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: padtrace\nVersion: 0\n")
    points = "[sglang.srt.plugins]\npadtrace = padtrace.record.plugin:register\n"
    (info / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture
def launcher(tmp_path: Path, site: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    process = subprocess.Popen(
        [sys.executable, "-m", "padtrace", "record", "--out", str(tmp_path / "out"), "--ring=4M",
         "--", str(tmp_path)],
        env={**kept, "PYTHONPATH": f"{site}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )  # fmt: skip
    yield process
    (tmp_path / "go").touch()
    process.kill()
    process.communicate()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path.name}"
        time.sleep(0.02)


def test_the_server_outlives_its_launcher(
    tmp_path: Path, launcher: subprocess.Popen[bytes]
) -> None:
    wait_for(tmp_path / "ready")
    launcher.kill()
    assert launcher.wait(30) == -signal.SIGKILL
    (tmp_path / "go").touch()
    wait_for(tmp_path / "ended")
    # It wrote this last, so it did not die of a line that nobody read.
    assert (tmp_path / "ended").read_text() == "well"

    (rings,) = (tmp_path / "out").glob(".rings-*")
    log = rings / LOG_NAME
    assert stat.S_IMODE(rings.stat().st_mode) == 0o700
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    written = log.read_text().splitlines()
    assert written == ["ready", *(f"line {line}" for line in range(LINES)), "the last line"]
    recording = seal([rings]).recording
    assert recording.rows("forward") == 2 * FORWARDS
    assert recording.table("process").column("complete").tolist() == [1]


def test_with_its_launcher_every_line_is_passed_on_and_no_log_stays(
    tmp_path: Path, launcher: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "go").touch()
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, (out[-2000:] + err).decode()
    lines = out.decode().splitlines()
    assert lines == ["ready", *(f"line {line}" for line in range(LINES)), "the last line"]
    assert LOG_NAME in err.decode()
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".safetensors"]
