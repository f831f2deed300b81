"""A new ring file: its folder, its room on the disk, its header.

Also what tells machines, boots and sessions apart, so that rings of different runs never mix.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from padtrace.record import filesystems, shared_memory, wire
from padtrace.record import ring_format as form
from padtrace.record.ring_folder import FolderRefused, opened

_MADV_POPULATE_WRITE = 23
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class RingUnavailable(Exception):
    """There is no room or no place for a ring; the reason is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RingFile:
    """A file that is allocated, mapped and has its header.

    Attributes:
        clock_offset_ns: wall clock minus monotonic clock, as read together.
        moved: why the ring is in shared memory and not in the folder asked for; "" where it is.
    """

    path: Path
    mapping: mmap.mmap
    size: int
    clock_offset_ns: int
    moved: str


def create_file(folder: Path, size_bytes: int, policy: str, run: str) -> RingFile:
    """Make `<folder>/<host>.<pid>.<random>.ring`; see `EventWriter.create`.

    Raises:
        RingUnavailable: with the reason; nothing is left behind.
    """
    if policy not in form.POLICIES:
        raise RingUnavailable(f"policy {policy!r} is none of {', '.join(form.POLICIES)}")
    size = size_bytes // form.PAGE * form.PAGE
    if not form.MIN_BYTES <= size <= form.MAX_BYTES:
        raise RingUnavailable(f"a ring cannot have {size_bytes} bytes; 256K to 4G can be had")
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0])[:48] or "host"
    stem = f"{host}.{os.getpid()}.{secrets.token_hex(4)}"
    pair = time.time_ns(), time.monotonic_ns()
    header = _header(size, policy, pair, run, host)
    try:
        _make_folder(folder)
        with opened(folder) as handle:
            moved = filesystems.doubt(handle)
            if moved:
                path, mapping = _in_shared_memory(handle, folder, stem, size, header, moved)
            else:
                path = folder / f"{stem}{form.SUFFIX}"
                mapping = _allocate(handle, path, size, header)
    except FolderRefused as refused:
        raise RingUnavailable(
            f"the ring folder {folder} is not used: {refused.reason}; {refused.hint}"
        ) from refused
    except (OSError, ValueError, OverflowError) as error:
        raise RingUnavailable(f"{folder / stem}{form.SUFFIX}: {_reason(error)}") from error
    return RingFile(path, mapping, size, pair[0] - pair[1], moved)


def _in_shared_memory(
    asked: int, folder: Path, stem: str, size: int, header: bytes, moved: str
) -> tuple[Path, mmap.mmap]:
    """The ring in a folder of its own in /dev/shm, and a pointer to it in the folder asked for.

    Raises:
        RingUnavailable: it has no room, or there is no shared memory that guarantees a page.
    """
    root = -1
    try:
        root = shared_memory.open_root()
        doubt = filesystems.doubt(root)
        if doubt:
            raise FolderRefused(doubt, "")
        host = stem.split(".")[0]
        made = shared_memory.make(root, asked, folder, stem, host, boot_id())
        try:
            path = made.path / f"{stem}{form.SUFFIX}"
            mapping = _allocate(made.handle, path, size, header)
        except BaseException:
            shared_memory.give_up(root, asked, made, stem)
            raise
        os.close(made.handle)
    except (OSError, ValueError, OverflowError, FolderRefused) as error:
        raise RingUnavailable(
            f"no ring can be had in {folder}: {moved}; and none of {size >> 10}K in"
            f" {shared_memory.ROOT}: {_reason(error)}; give the container more (--shm-size), ask"
            " for a smaller ring (PADTRACE_RING), or name a folder on ext4 or tmpfs"
        ) from error
    finally:
        if root >= 0:
            os.close(root)
    return path, mapping


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def boot_id() -> str:
    """Names this boot of the machine: monotonic clocks compare within it. "" where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:40]
    except OSError:
        return ""


def session() -> str:
    """Names the session of this process and when its leader started; tells starts apart."""
    leader = os.getsid(0)
    try:
        # Field 22 of stat; the command before it may hold anything, a closing bracket ends it.
        fields = Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()
        return f"{leader}.{fields[19]}"
    except (OSError, IndexError):
        return str(leader)


def _header(size: int, policy: str, pair: tuple[int, int], run: str, host: str) -> bytes:
    static = form.static_bytes(size)
    slots = (size - form.STATIC_OFFSET - static) // form.SLOT_BYTES
    fixed = form.HEADER.pack(
        form.MAGIC,
        form.VERSION,
        form.SLOT_BYTES,
        size,
        static,
        slots,
        form.POLICIES.index(policy),
        os.getpid(),
        pair[0],
        pair[1],
        wire.schema_digest(),
        run.encode("ascii", "replace")[:64],
        boot_id().encode("ascii", "replace"),
        host.encode("ascii", "replace")[:64],
        session().encode("ascii", "replace")[:48],
    )
    return fixed + form.CHECKSUM.pack(crc32(fixed))


def _make_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)


def map_new_file(folder: int, name: str, size: int, flags: int = mmap.MAP_SHARED) -> mmap.mmap:
    """A new file (0600) whose whole room is taken on the disk, mapped; locked while it is mapped.

    Args:
        folder: handle of the folder for it, one in which a page can be guaranteed.

    Raises:
        OSError, ValueError, OverflowError: there is no room or no place; nothing is left behind.
    """
    shared_memory.refuse_to_crowd(folder, size)
    handle = os.open(name, _NEW, 0o600, dir_fd=folder)
    try:
        # The mapping keeps the open file, and so the lock: it says that the writer lives.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(handle, 0, size)
        # Again, since other processes look at the same moment.
        shared_memory.refuse_to_crowd(folder, 0)
        return mmap.mmap(handle, size, flags=flags)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(handle)


def _allocate(folder: int, path: Path, size: int, header: bytes) -> mmap.mmap:
    """A new file of `size` bytes with `header`, mapped; removed again if any of it fails.

    Args:
        folder: handle of the folder of `path`.
    """
    # Under another name until the header stands, so that nobody reads half a ring.
    fresh = path.with_suffix(".new").name
    mapping = map_new_file(folder, fresh, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    try:
        # Made writable page by page now, so that the forward path does not meet the page faults;
        # a kernel before 5.14 does not know this.
        with contextlib.suppress(OSError):
            mapping.madvise(_MADV_POPULATE_WRITE)
        mapping[: len(header)] = header
        os.rename(fresh, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh, dir_fd=folder)
        raise
    return mapping
