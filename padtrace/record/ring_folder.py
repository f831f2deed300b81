"""A folder of rings that nobody else can change: opened, checked, and used by its handle.

Whoever may rename or add files in the folder could have the recorder write, or sealing read, what
they choose. A world-writable folder above it, with the sticky bit, is fine.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderRefused(Exception):
    """A folder that is not used.

    Attributes:
        reason: one line, what is wrong with it.
        hint: one line, what to do.
    """

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def open_folder(path: Path) -> int:
    """A handle of the folder itself, however its name is turned to something else meanwhile.

    Raises:
        FolderRefused: another user owns it or can write to it, or it is a symbolic link.
        OSError: there is no such folder, or it may not be opened.
    """
    try:
        handle = os.open(path, _OPEN)
    except NotADirectoryError:
        if path.is_symlink():
            raise FolderRefused("it is a symbolic link", "name the folder it leads to") from None
        raise
    try:
        _check(os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """`open_folder`, closed again at the end of the block."""
    handle = open_folder(path)
    try:
        yield handle
    finally:
        os.close(handle)


def open_subfolder(parent: int, name: str) -> int:
    """A handle of a folder in another, which must be ours and ours alone (mode 0700).

    Raises:
        FolderRefused: it is somebody else's, or others may read it.
        OSError: there is no such folder, or it is a symbolic link.
    """
    handle = os.open(name, _OPEN, dir_fd=parent)
    state = os.fstat(handle)
    if state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) != 0o700:
        os.close(handle)
        raise FolderRefused("it is not a private folder of this user", "remove it")
    return handle


def _check(state: os.stat_result) -> None:
    if state.st_uid != os.geteuid():
        raise FolderRefused(
            f"it belongs to another user (uid {state.st_uid})",
            "name a folder of your own, or copy it to one",
        )
    others_write = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others_write and not state.st_mode & stat.S_ISVTX:
        raise FolderRefused(
            f"other users can write to it (mode {stat.S_IMODE(state.st_mode):04o})",
            "take their right to write (chmod go-w), or name another folder",
        )
