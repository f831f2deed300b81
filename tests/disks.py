"""Small real disks for tests: a loop-mounted file, or a tmpfs. Making one takes root."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

# What the smallest disk of a kind needs.
_MIB = {"btrfs": 150, "ext4": 32, "tmpfs": 12, "xfs": 330, "xfs-reflink": 330, "overlay": 0}
_MAKE = {
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-m", "reflink=0"],
    "xfs-reflink": ["mkfs.xfs", "-q", "-f", "-m", "reflink=1"],
}


@contextlib.contextmanager
def mounted(kind: str, folder: Path, mib: int = 0, options: str = "") -> Iterator[Path]:
    """A disk of a kind (see `_MAKE`, also tmpfs and overlay), empty; skips where none can be had.

    Args:
        folder: an empty folder for what it needs.
        mib: its size; the smallest that serves by default.
        options: more options of `mount`.
    """
    disk = folder / f"disk-{kind}"
    disk.mkdir(parents=True)
    size = mib or _MIB[kind]
    if kind == "tmpfs":
        command = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={size}m,mode=755{options}",
            "tmpfs",
            str(disk),
        ]
    elif kind == "overlay":
        parts = [folder / name for name in ("lower", "upper", "work")]
        for part in parts:
            part.mkdir()
        given = ",".join(
            f"{name}dir={part}"
            for name, part in zip(("lower", "upper", "work"), parts, strict=True)
        )
        command = ["mount", "-t", "overlay", "-o", given + options, "overlay", str(disk)]
    else:
        image = folder / f"{kind}.img"
        with image.open("wb") as file:
            file.truncate(size << 20)
        _run([*_MAKE[kind], str(image)], f"a {kind} cannot be made here")
        command = ["mount", "-o", f"loop{options}", str(image), str(disk)]
    _run(command, f"a {kind} cannot be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Write until not a byte more goes in, the room of small files included."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    os.sync()
    with contextlib.suppress(OSError):
        for number in range(10_000):
            (disk / f"filler{number}").write_bytes(bytes(1 << 12))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (disk / "one more").write_bytes(bytes(1 << 16))
    (disk / "one more").unlink(missing_ok=True)
    os.sync()


def _run(command: list[str], what: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{what}: there is no `{command[0]}`")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{what}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
