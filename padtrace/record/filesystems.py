"""Whether a file's room, once allocated, can be relied on when its mapping is written.

A store into a mapped page that the file system cannot place is no error a program can handle: the
kernel sends SIGBUS, and a server would die of it. A file system that copies on write needs new
room for every page, whatever was allocated before, so it fails when the disk fills.
"""

from __future__ import annotations

import fcntl
import struct

# These write an allocated block where it lies. ext2 and ext3 cannot allocate: the C library writes
# the blocks instead.
_WRITTEN_IN_PLACE = frozenset({"ext2", "ext3", "ext4", "ramfs", "tmpfs"})
_COPIES = "copies a page to another place when it is written, which fails on a full disk"
_REASONS = {
    "bcachefs": _COPIES,
    "btrfs": _COPIES,
    "f2fs": _COPIES,
    "nilfs2": _COPIES,
    "zfs": _COPIES,
    "overlay": "does not say which file system keeps what is written to it",
    "xfs": "may share blocks between files (reflink), and then copies a page when it is written",
}
_ELSEWHERE = "does not promise that an allocated page can be written"
# XFS_IOC_FSGEOMETRY_V1 and its structure, from the kernel's include/uapi xfs_fs.h.
_XFS_GEOMETRY = 0x80705864
_XFS_GEOMETRY_BYTES = 112
_XFS_FLAGS_OFFSET = 92
_XFS_REFLINK = 1 << 20


def kind_of(handle: int) -> str:
    """The file system an open file or folder lies on, as /proc calls it; "" where unknown.

    The mount is looked up by the number that the open file states, so that bind mounts, overlays
    and mounts over mounts are told apart. Never raises.
    """
    try:
        with open(f"/proc/self/fdinfo/{handle}") as stated:
            (mount,) = (line.split()[1] for line in stated if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", errors="replace") as mounts:
            for line in mounts:
                if line.split(" ", 1)[0] == mount:
                    return line.rpartition(" - ")[2].split(" ", 1)[0]
    except (OSError, ValueError, IndexError):
        pass
    return ""


def doubt(handle: int) -> str:
    """Why a mapped page cannot be guaranteed where an open folder lies; "" where it can.

    Never raises.
    """
    kind = kind_of(handle)
    if kind in _WRITTEN_IN_PLACE or (kind == "xfs" and not _xfs_shares(handle)):
        return ""
    if not kind:
        return f"its file system is not known, and so {_ELSEWHERE}"
    return f"its file system {kind} {_REASONS.get(kind, _ELSEWHERE)}"


def _xfs_shares(handle: int) -> bool:
    """Whether files of an XFS may share blocks: also what a later `cp` does to a ring."""
    try:
        answer = fcntl.ioctl(handle, _XFS_GEOMETRY, bytes(_XFS_GEOMETRY_BYTES))
        (flags,) = struct.unpack_from("<I", answer, _XFS_FLAGS_OFFSET)
    except (OSError, struct.error):
        return True
    return bool(flags & _XFS_REFLINK)
