"""A new ring file: its folder, its room on the disk, its header.

Also what tells machines, boots and sessions apart, so that rings of different runs never mix.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from padtrace.record import ring_format as form
from padtrace.record import wire

_MADV_POPULATE_WRITE = 23


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
    """

    path: Path
    mapping: mmap.mmap
    size: int
    clock_offset_ns: int


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
    path = folder / f"{host}.{os.getpid()}.{secrets.token_hex(4)}{form.SUFFIX}"
    pair = time.time_ns(), time.monotonic_ns()
    try:
        _make_folder(folder)
        mapping = _allocate(path, size, _header(size, policy, pair, run, host))
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RingUnavailable(f"{path}: {reason}") from error
    return RingFile(path, mapping, size, pair[0] - pair[1])


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


def map_new_file(path: Path, size: int, flags: int = mmap.MAP_SHARED) -> mmap.mmap:
    """A new file (0600) whose whole room is taken on the disk, mapped.

    Raises:
        OSError, ValueError, OverflowError: there is no room or no place; nothing is left behind.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)
        return mmap.mmap(handle, size, flags=flags)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(handle)


def _allocate(path: Path, size: int, header: bytes) -> mmap.mmap:
    """A new file of `size` bytes with `header`, mapped; removed again if any of it fails."""
    # Under another name until the header stands, so that nobody reads half a ring.
    fresh = path.with_suffix(".new")
    mapping = map_new_file(fresh, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    try:
        # Made writable page by page now, so that the forward path does not meet the page faults;
        # a kernel before 5.14 does not know this.
        with contextlib.suppress(OSError):
            mapping.madvise(_MADV_POPULATE_WRITE)
        mapping[: len(header)] = header
        os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    return mapping
