"""The bounded, crash-proof file of tensor values that one process writes beside its ring."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from padtrace.record import filesystems
from padtrace.record.device_values import layout
from padtrace.record.ring_file import RingUnavailable, map_new_file
from padtrace.record.ring_folder import FolderRefused, opened

_KEPT = layout.COUNTER["kept"]
_DROPPED = layout.COUNTER["dropped"]
_OVERWRITTEN = layout.COUNTER["overwritten"]
_FAILED = layout.COUNTER["failed"]


class ValuesFile:
    """Takes tensors as bytes; keeps the newest (or with `keep_first` the oldest) of them.

    The file is allocated whole before it is mapped, like a ring: a full disk at the moment of a
    store would kill the server.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, size: int, keep_first: bool) -> None:
        """Use `create`."""
        self.path = path
        self._map = mapping
        self._half = layout.half_bytes(size)
        self._keep_first = keep_first
        counters = memoryview(mapping)[layout.COUNTERS_OFFSET : layout.PAGE]
        self._counters = counters.cast("q")
        self._generation = 1
        self._used = 0
        self._in_half = [0, 0]

    @classmethod
    def create(cls, path: Path, size_bytes: int, *, keep_first: bool = False) -> ValuesFile:
        """Make the file (0600), beside the ring: there a page can be guaranteed.

        Raises:
            RingUnavailable: there is no room or no place for it; nothing is left behind.
        """
        size = size_bytes // layout.PAGE * layout.PAGE
        fixed = layout.HEADER.pack(layout.MAGIC, layout.VERSION, os.getpid(), size)
        try:
            with opened(path.parent) as folder:
                unsafe = filesystems.doubt(folder)
                if unsafe:
                    raise FolderRefused(unsafe, "name a folder on ext4 or tmpfs")
                mapping = map_new_file(folder, path.name, size)
        except (OSError, ValueError, OverflowError, FolderRefused) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RingUnavailable(f"{path}: {reason}") from error
        header = fixed + layout.CHECKSUM.pack(crc32(fixed))
        mapping[: len(header)] = header
        return cls(path, mapping, size, keep_first)

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor that is taken: an eighth of a half, so that one event
        does not push out all others."""
        return self._half // 8

    def put(
        self, enter_seq: int, name: str, dtype: int, shape: Sequence[int], data: memoryview
    ) -> None:
        """Append a tensor of at most four dimensions; counted as dropped where it does not fit."""
        text = name.encode()
        room = layout.record_bytes(len(text), data.nbytes)
        if data.nbytes > self.largest or not self._make_room(room):
            self.drop()
            return
        start = layout.PAGE + self._generation % 2 * self._half + self._used
        body = start + layout.RECORD.size
        self._map[body : body + len(text)] = text
        end = body + len(text) + data.nbytes
        self._map[body + len(text) : end] = data
        sizes = (*shape, *(0,) * (layout.MAX_DIMENSIONS - len(shape)))
        numbers = (
            self._generation, enter_seq, len(text), dtype, len(shape), *sizes, data.nbytes,
        )  # fmt: skip
        head = layout.RECORD.pack(0, *numbers)
        checksum = crc32(memoryview(self._map)[body:end], crc32(head[layout.CHECKSUM.size :]))
        self._map[start:body] = layout.RECORD.pack(checksum, *numbers)
        self._used += room
        self._in_half[self._generation % 2] += 1
        self._counters[_KEPT] += 1

    def drop(self) -> None:
        """Count a tensor that is not written."""
        self._counters[_DROPPED] += 1

    def failed(self) -> None:
        """Say that copying was switched off."""
        self._counters[_FAILED] = 1

    def _make_room(self, room: int) -> bool:
        if self._used + room <= self._half:
            return True
        if room > self._half or (self._keep_first and self._generation == 2):
            return False
        self._generation += 1
        self._used = 0
        self._counters[_OVERWRITTEN] += self._in_half[self._generation % 2]
        self._in_half[self._generation % 2] = 0
        return True
