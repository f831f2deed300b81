"""The crash-proof ring: one memory-mapped, bounded file per recorded process.

The file is allocated whole before it is mapped, since a full disk at the moment of a store would
kill the server. A store into the mapping is in the kernel's hands at once, so that whatever kills
the process, at most the event being written is lost. Nothing here waits for a disk, and after
`create` nothing raises into the server: a failure switches the writer off and logs one line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from padtrace.record import ring_format as form
from padtrace.record import wire
from padtrace.record.native import RingCore
from padtrace.record.ring_core import NO_LIMIT
from padtrace.record.ring_file import RingUnavailable as RingUnavailable
from padtrace.record.ring_file import create_file
from padtrace.sharing.rule import kept_facts

logger = logging.getLogger("padtrace")

TABLE_FULL = "<string table full>"
MAX_STRING_BYTES = 2048
# Events an `error` ring still takes after the first error: how the other workers went on.
EVENTS_AFTER_ERROR = 256

_COMPLETE = form.COUNTER["complete"]
_BAD = form.COUNTER["bad"]
_STATIC_USED = form.COUNTER["static_used"]
_STATIC_REFUSED = form.COUNTER["static_refused"]
_HOOKS = form.COUNTER["hooks"]
_ERRORS = form.COUNTER["errors"]
_DIVERGENCES = form.COUNTER["divergences"]
_FROZEN = form.COUNTER["frozen"]

_ERROR_KIND = wire.kind_index("error")


class EventWriter(RingCore):
    """Writes the events of this process into its ring; safe to call from several threads.

    A child made by fork shares the mapping, so there the writer is off from the start.

    Attributes:
        path: the ring file.
        clock_offset_ns: `time.monotonic_ns() + clock_offset_ns` is the event time `t_ns`. It does
            not follow later jumps of the wall clock.
        moved: why the ring is in shared memory and not in the folder asked for; "" where it is.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, size: int, policy: str, offset: int) -> None:
        """Use `create`."""
        static = form.static_bytes(size)
        offset_of_slots = form.STATIC_OFFSET + static
        slots = (size - offset_of_slots) // form.SLOT_BYTES
        super().__init__(mapping, offset_of_slots, slots, slots if policy == "first" else NO_LIMIT)
        self.path = path
        self.clock_offset_ns = offset
        self.moved = ""
        self._map = mapping
        self._policy = policy
        self._static_limit = static
        # Reentrant, since a signal handler may run a hooked function inside `string`.
        self._static_lock = threading.RLock()
        self._counters = memoryview(mapping)[form.COUNTERS_OFFSET : form.HOOKS_OFFSET].cast("q")
        self._lost = memoryview(mapping)[form.HOOKS_OFFSET : form.STATIC_OFFSET].cast("q")[
            form.MAX_HOOKS :
        ]
        self._strings: dict[str, int] = {}
        self._warned: set[str] = set()
        self.string(TABLE_FULL)
        _forget_in_children(self)

    @classmethod
    def create(
        cls, folder: Path, *, size_bytes: int, policy: str = "last", run: str = ""
    ) -> EventWriter:
        """Make and map `<folder>/<host>.<pid>.<random>.ring` (0600; a new folder is 0700).

        Where the folder's file system cannot guarantee a page of a mapped file, the ring is made
        in shared memory instead, and a pointer to it (`.shm`) in the folder.

        Args:
            size_bytes: size of the whole file, at least 256 KiB.
            policy: `last` keeps the newest events, `first` the oldest, `error` the newest until
                some events after the first error event.
            run: what `PADTRACE_RUN` says; rings of different runs are never mixed.

        Raises:
            RingUnavailable: no room, no folder, not writable, or others can write to the folder.
                Nothing is left behind.
        """
        fresh = create_file(Path(folder), size_bytes, policy, run)
        writer = cls(fresh.path, fresh.mapping, fresh.size, policy, fresh.clock_offset_ns)
        if fresh.moved:
            writer.moved = fresh.moved
            writer.facts({"recorder": {"in_shared_memory": fresh.moved}})
        return writer

    def string(self, text: str) -> int:
        """The id of a string in this process; the id of "<string table full>" when it is."""
        found = self._strings.get(text)
        if found is not None:
            return found
        if not self.on:
            return 0
        try:
            with self._static_lock:
                number = len(self._strings)
                data = str(text).encode("utf-8", "replace")[:MAX_STRING_BYTES]
                if not self._static(form.ENTRY_STRING, number, data):
                    return 0
                self._strings[text] = number
                return number
        except Exception as error:
            self._fail(error)
            return 0

    def facts(self, patch: Mapping[str, Any]) -> None:
        """Merge `patch` into the facts, objects into objects; only what the positive list keeps."""
        if not self.on:
            return
        try:
            data = json.dumps(kept_facts(patch), default=str, separators=(",", ":")).encode()
            with self._static_lock:
                if not self._static(form.ENTRY_FACTS, 0, data):
                    self._say_once("facts", "the ring has no room for more facts")
        except (TypeError, ValueError) as error:
            self._say_once("facts", f"facts could not be written: {error}")
        except Exception as error:
            self._fail(error)

    def hook(self, name: str, status: str, target: str = "", note: str = "") -> int:
        """Register a hook (status: found, moved, absent, lost); its number, or -1 if none is left.

        Args:
            name: what coverage calls it.
            target: dotted name of the function hooked.
            note: one line for the reader, such as where it moved to.
        """
        if not self.on:
            return -1
        try:
            about = {"name": name, "status": status, "target": target, "note": note}
            data = json.dumps(about, separators=(",", ":")).encode()
            with self._static_lock:
                number = self._counters[_HOOKS]
                if number >= form.MAX_HOOKS or not self._static(form.ENTRY_HOOK, number, data):
                    self._say_once("hooks", f"no room to register hook {name}")
                    return -1
                self._counters[_HOOKS] = number + 1
                return number
        except Exception as error:
            self._fail(error)
            return -1

    def lost(self, hook: int, reason: int) -> None:
        """A hook failed and is switched off; `reason` is the id of a string."""
        if self.on and hook >= 0:
            try:
                self._lost[hook] = reason + 1
            except Exception as error:
                self._fail(error)

    def divergence(self, n: int = 1) -> None:
        """Count row contracts that the live alarm found broken (for the live status)."""
        if self.on:
            try:
                self._counters[_DIVERGENCES] += n
            except Exception as error:
                self._fail(error)

    def close(self, complete: bool = True) -> None:
        """End recording. The mapping stays until the process ends, since another thread may be
        inside `write`."""
        if not self.on:
            return
        self.on = False
        with contextlib.suppress(Exception):
            self.run_ahead(False)
        with contextlib.suppress(Exception), self._static_lock:
            self._counters[_COMPLETE] = int(complete)

    def _around_error(self, kind: int) -> None:
        if kind == _ERROR_KIND:
            self._counters[_ERRORS] += 1
            if self._policy == "error" and not self.countdown:
                self.countdown = EVENTS_AFTER_ERROR + 1
        if self.countdown > 1:
            self.countdown -= 1
        elif self.countdown == 1 and not self._counters[_FROZEN]:
            self.limit = 0
            self._counters[_FROZEN] = 1

    def _static(self, kind: int, number: int, data: bytes) -> bool:
        used = self._counters[_STATIC_USED]
        end = used + (form.ENTRY.size + len(data) + 7) // 8 * 8
        if end > self._static_limit:
            self._counters[_STATIC_REFUSED] += 1
            return False
        at = form.STATIC_OFFSET + used
        self._map[at + form.ENTRY.size : at + form.ENTRY.size + len(data)] = data
        checksum = crc32(data, kind << 16 ^ number)
        form.ENTRY.pack_into(self._map, at, len(data), checksum, kind, number)
        self._counters[_STATIC_USED] = end
        return True

    def _bad_event(self, kind: int, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._counters[_BAD] += 1
            name = _kind_name(kind)
            self._say_once(f"bad {name}", f"a {name} event could not be written: {error}")

    def _say_once(self, subject: str, line: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning("padtrace: %s", line)

    def _fail(self, error: Exception) -> None:
        self.on = False
        with contextlib.suppress(Exception):
            logger.warning(
                "padtrace: recording of this process is off: %s: %s", type(error).__name__, error
            )


def _kind_name(kind: int) -> str:
    return wire.KINDS[kind] if 0 <= kind < len(wire.KINDS) else f"kind {kind}"


def _forget_in_children(writer: EventWriter) -> None:
    reference = weakref.ref(writer)

    def forget() -> None:
        parent = reference()
        if parent is not None:
            parent.on = False

    os.register_at_fork(after_in_child=forget)
