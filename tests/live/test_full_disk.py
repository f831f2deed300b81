"""A full disk, a small real one: the server answers every request all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import fill, mounted
from tests.live import by_hand

pytestmark = pytest.mark.live
DISK_MIB = 4
OFF = "padtrace: recording of this process is off"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted("tmpfs", tmp_path, mib=DISK_MIB) as small:
        yield small


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


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "btrfs"])
def test_filled_while_recording(tmp_path: Path, kind: str) -> None:
    """On btrfs a ring in the folder itself would kill the server; see test_ring_place.py."""
    with mounted(kind, tmp_path / "disks") as disk:
        _fill_while_recording(tmp_path, disk, in_shared_memory=kind == "btrfs")


def _fill_while_recording(tmp_path: Path, disk: Path, in_shared_memory: bool) -> None:
    rings = disk / "rings"
    with by_hand.serving(tmp_path, rings, by_hand.DENSE) as server:
        by_hand.answered(server)
        fill(disk)
        before = by_hand.forwards(rings)
        by_hand.answered(server, (3, 17, 70, 1, 9))
        os.sync()
        by_hand.answered(server, (3, 17, 70, 1, 9))
        assert by_hand.lines_of(server, OFF) == []
        moved = by_hand.lines_of(server, "padtrace: recording to /dev/shm/padtrace-")
        assert len(moved) == (2 if in_shared_memory else 0)
    after = by_hand.forwards(rings)
    recording, _ = by_hand.seal(tmp_path, rings)
    assert len(before) == 2
    assert all(after[pid] >= before[pid] + 10 for pid in before)
    process = recording.table("forward").column("process")
    recorded = [int((process == row).sum()) for row in range(recording.rows("process"))]
    assert sorted(recorded) == sorted(after.values())
    assert len(recording.coverage.get("in_shared_memory", {})) == len(moved)
    assert not in_shared_memory or by_hand.forwards(rings) == {}  # freed by sealing
