"""Rings in shared memory, where the folder that was asked for cannot guarantee a page.

Each process makes a folder of its own, `/dev/shm/padtrace-<random>` (0700), and leaves a small
pointer file in the folder asked for, by which sealing finds it. The pointer is not believed beyond
that: it can name a folder of this pattern, directly in /dev/shm, of this user, and nothing else.

What a restart of the machine or the container takes with it is gone. What was sealed is removed;
what nobody points to any more is removed when the next ring is made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padtrace.record import filesystems
from padtrace.record.ring_folder import FolderRefused, open_subfolder
from padtrace.record.ring_format import SUFFIX

ROOT = Path("/dev/shm")
# SGLang and NCCL keep queues of their own there, whose pages are taken when they are first written:
# without room for one they would die of it. So this share of all of it is left free.
KEEP_FREE = 0.5
POINTER_SUFFIX = ".shm"
_ORIGIN = "origin"
_FOLDER = re.compile(r"padtrace-[0-9a-f]{16}")
_STEM = re.compile(r"[A-Za-z0-9-]{1,48}\.[0-9]{1,10}\.[0-9a-f]{8}")
_PLAIN = re.compile(r"[A-Za-z0-9-]{0,64}")
_MAX_POINTER_BYTES = 8192
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A new folder in shared memory.

    Attributes:
        handle: of the open folder; the caller closes it.
        path: where it is.
    """

    handle: int
    path: Path


@dataclass(frozen=True, slots=True)
class Pointed:
    """Where a pointer leads.

    Attributes:
        pointer: the pointer file.
        ring: the ring; None if there is none (yet).
        problem: one line why there can be none; "" if there may be one later.
    """

    pointer: Path
    ring: Path | None = None
    problem: str = ""


def open_root() -> int:
    """A handle of /dev/shm. Who may rename folders there does not matter: ours are used by their
    handles and believed only if this user owns them.

    Raises:
        OSError: there is none.
    """
    return os.open(ROOT, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def refuse_to_crowd(folder: int, size: int) -> None:
    """Say that there is no room where `size` more bytes would leave too little to the server.

    Args:
        folder: handle of the folder for them; nothing is said of folders outside /dev/shm.

    Raises:
        OSError: there is no room.
    """
    try:
        # Where nothing is mounted on /dev/shm it is a folder like others, of a disk.
        mounted = filesystems.kind_of(folder) == "tmpfs"
        if not mounted or os.fstat(folder).st_dev != os.stat(ROOT).st_dev:
            return
    except OSError:
        return
    state = os.fstatvfs(folder)
    free, whole = (blocks * state.f_frsize for blocks in (state.f_bavail, state.f_blocks))
    if whole and free - size < whole * KEEP_FREE:
        share = f"{KEEP_FREE:.0%} of it are left to the server"
        have = f"{free >> 20} of {whole >> 20} MiB are free"
        raise OSError(errno.ENOSPC, f"no room in shared memory: {have}, and {share}")


def make(root: int, asked: int, folder: Path, stem: str, host: str, boot: str) -> SharedFolder:
    """A folder in shared memory for the ring `stem`, and the pointer to it in `folder`.

    Args:
        root: handle of /dev/shm.
        asked, folder: handle and path of the folder that was asked for.

    Raises:
        OSError: there is no room or no right; nothing is left behind.
        FolderRefused: somebody got in between.
    """
    with contextlib.suppress(OSError):
        sweep(root)
    name = f"padtrace-{secrets.token_hex(8)}"
    pointer = stem + POINTER_SUFFIX
    os.mkdir(name, 0o700, dir_fd=root)
    handle = -1
    try:
        handle = open_subfolder(root, name)
        about = {"padtrace": 1, "folder": name, "host": host, "boot": boot}
        _write_new(asked, pointer, about)
        origin = {"pointer": str(folder.absolute() / pointer), "mounts": _mounts()}
        _write_new(handle, _ORIGIN, origin)
    except BaseException:
        _discard(root, name, handle)
        with contextlib.suppress(OSError):
            os.unlink(pointer, dir_fd=asked)
        raise
    return SharedFolder(handle, ROOT / name)


def give_up(root: int, asked: int, made: SharedFolder, stem: str) -> None:
    """Remove what `make` made, where no ring could be had after all. Never raises."""
    with contextlib.suppress(OSError):
        os.unlink(stem + POINTER_SUFFIX, dir_fd=asked)
    _discard(root, made.path.name, made.handle)


def follow(folder: int, pointer: Path) -> Pointed:
    """Where a pointer leads, whatever stands in it. Never raises.

    Args:
        folder: handle of the folder in which the pointer file is.
    """
    about = _read(folder, pointer.name)
    name = about.get("folder")
    stem = pointer.name.removesuffix(POINTER_SUFFIX)
    if not isinstance(name, str) or not _FOLDER.fullmatch(name) or not _STEM.fullmatch(stem):
        return Pointed(pointer, None, f"{pointer.name} is no pointer to a ring, or was changed")
    try:
        with _opened_root() as root:
            os.close(open_subfolder(root, name))
    except FolderRefused as refused:
        return Pointed(pointer, None, f"{pointer.name}: what it points to is not used: {refused}")
    except OSError:
        host = about.get("host")
        of = f" of {host}" if isinstance(host, str) and _PLAIN.fullmatch(host) and host else ""
        return Pointed(
            pointer,
            None,
            f"the ring of {stem} was kept in the shared memory{of}, which is another machine or"
            " container, or was started again since: seal it there, while it runs",
        )
    ring = ROOT / name / f"{stem}{SUFFIX}"
    return Pointed(pointer, ring if ring.is_file() and not ring.is_symlink() else None)


def in_use(ring: Path) -> bool:
    """Whether the process that writes a ring still lives: its mapping keeps the file locked."""
    try:
        handle = os.open(ring, _READ)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def remove(pointed: Pointed) -> bool:
    """Remove a ring, what lies beside it and the pointer; whether that was possible."""
    try:
        if pointed.ring is not None:
            with _opened_root() as root:
                name = pointed.ring.parent.name
                _discard(root, name, open_subfolder(root, name))
        pointed.pointer.unlink()
    except (OSError, FolderRefused):
        return False
    return True


def sweep(root: int) -> None:
    """Remove our folders to which no pointer leads any more and in which nobody writes.

    Only those of this mount namespace: whether a file of another container is there cannot be
    told from here.

    Raises:
        OSError: /dev/shm cannot be listed.
    """
    for name in os.listdir(root):
        if _FOLDER.fullmatch(name):
            with contextlib.suppress(OSError, FolderRefused):
                handle = open_subfolder(root, name)
                if _forgotten(handle, ROOT / name):
                    _discard(root, name, handle)
                else:
                    os.close(handle)


def _forgotten(handle: int, path: Path) -> bool:
    origin = _read(handle, _ORIGIN)
    pointer = origin.get("pointer")
    if not isinstance(pointer, str) or origin.get("mounts") != _mounts() or not _mounts():
        return False
    rings = [name for name in os.listdir(handle) if name != _ORIGIN]
    return not os.path.lexists(pointer) and not any(in_use(path / name) for name in rings)


def _discard(root: int, name: str, handle: int) -> None:
    """Remove one of our folders with the files in it; closes its handle. Never raises."""
    with contextlib.suppress(OSError):
        if handle >= 0:
            for file in os.listdir(handle):
                with contextlib.suppress(OSError):
                    os.unlink(file, dir_fd=handle)
            os.close(handle)
        os.rmdir(name, dir_fd=root)


@contextlib.contextmanager
def _opened_root() -> Iterator[int]:
    handle = open_root()
    try:
        yield handle
    finally:
        os.close(handle)


def _mounts() -> str:
    """Names the mount namespace of this process; "" where it cannot be told."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


def _write_new(folder: int, name: str, about: dict[str, Any]) -> None:
    handle = os.open(name, _NEW, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(about).encode())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


def _read(folder: int, name: str) -> dict[str, Any]:
    """A small JSON object of a regular file; {} for anything else."""
    try:
        handle = os.open(name, _READ, dir_fd=folder)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return {}
            data = file.read(_MAX_POINTER_BYTES + 1)
        about = json.loads(data) if len(data) <= _MAX_POINTER_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}
