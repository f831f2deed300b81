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
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from padtrace.record import ring_format as form
from padtrace.record import wire
from padtrace.record.redact import redact_facts
from padtrace.record.ring_file import RingUnavailable as RingUnavailable
from padtrace.record.ring_file import create_file
from padtrace.recording.schema import EVENT_KINDS

logger = logging.getLogger("padtrace")

TABLE_FULL = "<string table full>"
MAX_STRING_BYTES = 2048
# Events an `error` ring still takes after the first error: how the other workers went on.
EVENTS_AFTER_ERROR = 256

_COMPLETE = form.COUNTER["complete"]
_EVENTS = form.COUNTER["events"]
_UPDATES = form.COUNTER["updates"]
_REFUSED = form.COUNTER["refused"]
_BAD = form.COUNTER["bad"]
_STATIC_USED = form.COUNTER["static_used"]
_STATIC_REFUSED = form.COUNTER["static_refused"]
_HOOKS = form.COUNTER["hooks"]
_FORWARDS = form.COUNTER["forwards"]
_ERRORS = form.COUNTER["errors"]
_DIVERGENCES = form.COUNTER["divergences"]
_FROZEN = form.COUNTER["frozen"]

_FORWARD_KIND = wire.kind_index("forward")
_ERROR_KIND = wire.kind_index("error")
_PAYLOAD = form.PAYLOAD_BYTES
_SLOT_BYTES = form.SLOT_BYTES
_PAYLOAD_TWICE = 2 * _PAYLOAD
_put = form.SLOT.pack_into
# Most events take two or three slots; one call for all of them is the cheaper one.
_put_two = struct.Struct("<" + 2 * form.SLOT.format.lstrip("<")).pack_into
_put_three = struct.Struct("<" + 3 * form.SLOT.format.lstrip("<")).pack_into
_NO_LIMIT = 1 << 62


class EventWriter:
    """Writes the events of this process into its ring; safe to call from several threads.

    A child made by fork shares the mapping, so there the writer is off from the start.

    Attributes:
        path: the ring file.
        clock_offset_ns: `time.monotonic_ns() + clock_offset_ns` is the event time `t_ns`. It does
            not follow later jumps of the wall clock.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, size: int, policy: str, offset: int) -> None:
        """Use `create`."""
        self.path = path
        self.clock_offset_ns = offset
        self._on = True
        self._map = mapping
        self._policy = policy
        # Reentrant, since a signal handler may run a hooked function inside `write`; space is
        # reserved before it is filled, so that such an inner event simply follows.
        self._lock = threading.RLock()
        self._counters = memoryview(mapping)[form.COUNTERS_OFFSET : form.HOOKS_OFFSET].cast("q")
        hooks = memoryview(mapping)[form.HOOKS_OFFSET : form.STATIC_OFFSET].cast("q")
        self._fired = hooks[: form.MAX_HOOKS]
        self._lost = hooks[form.MAX_HOOKS :]
        self._static_limit = form.static_bytes(size)
        self._slots_offset = form.STATIC_OFFSET + self._static_limit
        self._slots = (size - self._slots_offset) // _SLOT_BYTES
        self._longest = min(form.MAX_CHAIN, max(1, self._slots // 4)) * _PAYLOAD
        self._next = 0
        self._events = 0
        # Sequence numbers end here: where a `first` ring is full or an `error` ring freezes.
        self._limit = self._slots if policy == "first" else _NO_LIMIT
        self._countdown = 0
        self._strings: dict[str, int] = {}
        self._warned: set[str] = set()
        self.string(TABLE_FULL)
        _forget_in_children(self)

    @classmethod
    def create(
        cls, folder: Path, *, size_bytes: int, policy: str = "last", run: str = ""
    ) -> EventWriter:
        """Make and map `<folder>/<host>.<pid>.<random>.ring` (0600; a new folder is 0700).

        Args:
            size_bytes: size of the whole file, at least 256 KiB.
            policy: `last` keeps the newest events, `first` the oldest, `error` the newest until
                some events after the first error event.
            run: what `PADTRACE_RUN` says; rings of different runs are never mixed.

        Raises:
            RingUnavailable: no room, no folder, not writable. Nothing is left behind.
        """
        fresh = create_file(Path(folder), size_bytes, policy, run)
        return cls(fresh.path, fresh.mapping, fresh.size, policy, fresh.clock_offset_ns)

    @property
    def on(self) -> bool:
        """Whether events are still taken."""
        return self._on

    def write(self, kind: int, scalars: Sequence[int], values: Sequence[int] = ()) -> None:
        """Append one event; see `record.wire` for the order of the numbers."""
        if not self._on:
            return
        try:
            data = wire.pack(kind, scalars, values)
            with self._lock:
                counters = self._counters
                self._events = events = self._events + 1
                counters[_EVENTS] = events
                if kind == _FORWARD_KIND:
                    counters[_FORWARDS] += 1
                if not self._append(data):
                    counters[_REFUSED] += 1
                if kind == _ERROR_KIND or self._countdown:
                    self._around_error(kind)
        except (struct.error, TypeError) as error:
            self._bad_event(kind, error)
        except Exception as error:
            self._fail(error)

    def update(self, kind: int, enter_seq: int, pairs: Sequence[int]) -> None:
        """Complete an earlier event: column index in `event_columns(kind)`, value, ..."""
        if not self._on:
            return
        try:
            data = wire.pack_update(kind, enter_seq, pairs)
            with self._lock:
                self._counters[_UPDATES] += 1
                self._append(data)
        except (struct.error, TypeError) as error:
            self._bad_event(kind, error)
        except Exception as error:
            self._fail(error)

    def string(self, text: str) -> int:
        """The id of a string in this process; the id of "<string table full>" when it is."""
        found = self._strings.get(text)
        if found is not None:
            return found
        if not self._on:
            return 0
        try:
            with self._lock:
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
        """Merge `patch` into the facts, objects into objects; secrets are taken out."""
        if not self._on:
            return
        try:
            data = json.dumps(redact_facts(patch), default=str, separators=(",", ":")).encode()
            with self._lock:
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
        if not self._on:
            return -1
        try:
            about = {"name": name, "status": status, "target": target, "note": note}
            data = json.dumps(about, separators=(",", ":")).encode()
            with self._lock:
                number = self._counters[_HOOKS]
                if number >= form.MAX_HOOKS or not self._static(form.ENTRY_HOOK, number, data):
                    self._say_once("hooks", f"no room to register hook {name}")
                    return -1
                self._counters[_HOOKS] = number + 1
                return number
        except Exception as error:
            self._fail(error)
            return -1

    def count(self, hook: int, n: int = 1) -> None:
        """`n` more calls of a hook."""
        if self._on and hook >= 0:
            try:
                self._fired[hook] += n
            except Exception as error:
                self._fail(error)

    def lost(self, hook: int, reason: int) -> None:
        """A hook failed and is switched off; `reason` is the id of a string."""
        if self._on and hook >= 0:
            try:
                self._lost[hook] = reason + 1
            except Exception as error:
                self._fail(error)

    def divergence(self, n: int = 1) -> None:
        """Count row contracts that the live alarm found broken (for the live status)."""
        if self._on:
            try:
                self._counters[_DIVERGENCES] += n
            except Exception as error:
                self._fail(error)

    def close(self, complete: bool = True) -> None:
        """End recording. The mapping stays until the process ends, since another thread may be
        inside `write`."""
        if not self._on:
            return
        self._on = False
        with contextlib.suppress(Exception), self._lock:
            self._counters[_COMPLETE] = int(complete)

    def _append(self, data: bytes) -> bool:
        """Put a record into the next slots; False if the policy or its length forbids it."""
        size = len(data)
        total = (size + _PAYLOAD - 1) // _PAYLOAD
        first = self._next
        if first + total > self._limit or size > self._longest:
            return False
        self._next = first + total
        # form.seed, without the call.
        checksum = crc32(data, first + (first >> 32) + (size << 1) & 0xFFFFFFFF)
        slots, into = self._slots, self._map
        row = first % slots
        at = self._slots_offset + row * _SLOT_BYTES
        if total == 1:
            _put(into, at, first + 1, checksum, 0, 1, size, data)
        elif total == 2 and row + 2 <= slots:
            one, two = data[:_PAYLOAD], data[_PAYLOAD:]
            # fmt: off
            _put_two(into, at, first + 1, checksum, 0, 2, size, one,
                     first + 2, checksum, 1, 2, size, two)
            # fmt: on
        elif total == 3 and row + 3 <= slots:
            one, two, three = data[:_PAYLOAD], data[_PAYLOAD:_PAYLOAD_TWICE], data[_PAYLOAD_TWICE:]
            # fmt: off
            _put_three(into, at, first + 1, checksum, 0, 3, size, one,
                       first + 2, checksum, 1, 3, size, two, first + 3, checksum, 2, 3, size, three)
            # fmt: on
        else:
            self._put_chain(data, first, total, checksum)
        return True

    def _put_chain(self, data: bytes, first: int, total: int, checksum: int) -> None:
        """A record of any length, also one that goes on at the start of the ring."""
        for position in range(total):
            sequence = first + position
            at = self._slots_offset + sequence % self._slots * _SLOT_BYTES
            part = data[position * _PAYLOAD : position * _PAYLOAD + _PAYLOAD]
            _put(self._map, at, sequence + 1, checksum, position, total, len(data), part)

    def _around_error(self, kind: int) -> None:
        if kind == _ERROR_KIND:
            self._counters[_ERRORS] += 1
            if self._policy == "error" and not self._countdown:
                self._countdown = EVENTS_AFTER_ERROR + 1
        if self._countdown > 1:
            self._countdown -= 1
        elif self._countdown == 1 and not self._counters[_FROZEN]:
            self._limit = 0
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
        self._on = False
        with contextlib.suppress(Exception):
            logger.warning(
                "padtrace: recording of this process is off: %s: %s", type(error).__name__, error
            )


def _kind_name(kind: int) -> str:
    return EVENT_KINDS[kind] if 0 <= kind < len(EVENT_KINDS) else f"kind {kind}"


def _forget_in_children(writer: EventWriter) -> None:
    reference = weakref.ref(writer)

    def forget() -> None:
        parent = reference()
        if parent is not None:
            parent._on = False

    os.register_at_fork(after_in_child=forget)
