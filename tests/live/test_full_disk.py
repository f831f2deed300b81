"""A full disk, a real one of a few megabytes: the server answers every request all the same."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import by_hand

pytestmark = pytest.mark.live
DISK_BYTES = 4 << 20
OFF = "padtrace: recording of this process is off"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own in memory; making one takes root."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mounted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def fill(disk: Path) -> None:
    """Write until not a byte more goes in."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (disk / "one more").write_bytes(bytes(1 << 12))
    (disk / "one more").unlink(missing_ok=True)


def test_full_before_recording_starts(tmp_path: Path, disk: Path) -> None:
    fill(disk)
    rings = disk / "rings"
    with by_hand.serving(tmp_path, rings, by_hand.DENSE) as server:
        by_hand.answered(server)
        said = by_hand.lines_of(server, "padtrace: ")
    off = [line for line in said if OFF in line]
    assert len(off) == 2, said  # one line for each of the two ranks
    assert all("space" in line or "room" in line for line in off), off
    assert list(rings.glob("*")) == []


def test_filled_while_recording(tmp_path: Path, disk: Path) -> None:
    rings = disk / "rings"
    with by_hand.serving(tmp_path, rings, by_hand.DENSE) as server:
        by_hand.answered(server)
        fill(disk)
        before = by_hand.forwards(rings)
        by_hand.answered(server, (3, 17, 70, 1, 9))
        assert by_hand.lines_of(server, OFF) == []
    after = by_hand.forwards(rings)
    recording, _ = by_hand.seal(tmp_path, rings)
    assert len(before) == 2
    assert all(after[pid] >= before[pid] + 5 for pid in before)
    process = recording.table("forward").column("process")
    recorded = [int((process == row).sum()) for row in range(recording.rows("process"))]
    assert sorted(recorded) == sorted(after.values())
