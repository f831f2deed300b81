"""The part of a ring's writer that runs in the forward path, in plain Python.

`record.native` has the same class compiled, where it could be; this one says what it does. Nothing
here waits for a disk or raises into the server.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from padtrace.record import ring_format as form
from padtrace.record import wire
from padtrace.recording.absent import NOT_OBSERVED_CODE

_EVENTS = form.COUNTER["events"]
_UPDATES = form.COUNTER["updates"]
_REFUSED = form.COUNTER["refused"]
_FORWARDS = form.COUNTER["forwards"]

_FORWARD_KIND = wire.kind_index("forward")
_ERROR_KIND = wire.kind_index("error")
_PAYLOAD = form.PAYLOAD_BYTES
_SLOT_BYTES = form.SLOT_BYTES
_put = form.SLOT.pack_into
# Most records take one or two slots; one call for both is the cheaper one.
_put_two = struct.Struct("<" + 2 * form.SLOT.format.lstrip("<")).pack_into
NO_LIMIT = 1 << 62


class Snapshot:
    """The rows and host integers of one object at one moment.

    Attributes:
        scalars: in schema order, a vector's place holding its length; empty if nobody looked.
        values: the vectors, one after the other.
        reference: sequence number of its record in the ring; -1 before it is written.
    """

    __slots__ = ("reference", "scalars", "values")

    def __init__(self, scalars: list[int], values: list[int]) -> None:
        self.scalars = scalars
        self.values = values
        self.reference = -1

    def scalar(self, place: int) -> int:
        """One of the scalars."""
        return self.scalars[place]


class RingCore:
    """Puts records into the slots of a mapped ring; safe to call from several threads.

    Attributes:
        on: whether events are still taken.
        next: sequence number of the next slot.
        limit: sequence numbers end here: where a `first` ring is full or an `error` ring freezes.
        countdown: events an `error` ring still takes, plus one; 0 before the first error.
    """

    def __init__(self, mapping: mmap.mmap, slots_offset: int, slots: int, limit: int) -> None:
        """
        Args:
            slots_offset: where the slots begin in the mapping.
            slots: how many there are.
        """
        self.on = True
        self.next = 0
        self.limit = limit
        self.countdown = 0
        self._map = mapping
        # Reentrant, since a signal handler may run a hooked function inside `write`; space is
        # reserved before it is filled, so that such an inner event simply follows.
        self._lock = threading.RLock()
        self._counters = memoryview(mapping)[form.COUNTERS_OFFSET : form.HOOKS_OFFSET].cast("q")
        hooks = memoryview(mapping)[form.HOOKS_OFFSET : form.STATIC_OFFSET].cast("q")
        self._fired = hooks[: form.MAX_HOOKS]
        self._slots_offset = slots_offset
        self._slots = slots
        self._longest = min(form.MAX_CHAIN, max(1, slots // 4)) * _PAYLOAD
        # A snapshot older than this is written again, so that it outlives what refers to it.
        self._old = max(1, slots // 4)

    def run_ahead(self, on: bool) -> bool:
        """Have a thread meet the page faults of the slots to come, or end it; whether one runs.

        The kernel write-protects pages that it has written back, so that the next store into one
        waits for it. Only the extension has a thread that does not need the interpreter.
        """
        return False

    def write(self, kind: int, scalars: Sequence[int], values: Sequence[int] = ()) -> None:
        """Append one event; see `record.wire` for the order of the numbers."""
        if not self.on:
            return
        try:
            data = wire.pack(kind, scalars, values)
            with self._lock:
                counters = self._counters
                counters[_EVENTS] += 1
                if kind == _FORWARD_KIND:
                    counters[_FORWARDS] += 1
                if self._append(data) < 0:
                    counters[_REFUSED] += 1
                if kind == _ERROR_KIND or self.countdown:
                    self._around_error(kind)
        except (struct.error, TypeError) as error:
            self._bad_event(kind, error)
        except Exception as error:
            self._fail(error)

    def update(self, kind: int, enter_seq: int, pairs: Sequence[int]) -> None:
        """Complete an earlier event: column index in `event_columns(kind)`, value, ..."""
        if not self.on:
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

    def keep(self, snapshot: Snapshot) -> int:
        """What stands for a snapshot in an event; its record is written if it is not there yet."""
        reference = snapshot.reference
        if reference >= 0 and self.next - reference < self._old:
            return reference
        if not self.on or not snapshot.scalars:
            return NOT_OBSERVED_CODE
        try:
            data = wire.pack(wire.SNAPSHOT_KIND, snapshot.scalars, snapshot.values)
            with self._lock:
                reference = self._append(data)
        except (struct.error, TypeError) as error:
            self._bad_event(wire.SNAPSHOT_KIND, error)
            return NOT_OBSERVED_CODE
        except Exception as error:
            self._fail(error)
            return NOT_OBSERVED_CODE
        if reference < 0:
            if len(data) > self._longest:
                self._counters[_REFUSED] += 1
            else:
                # Full: no smaller event may follow without its snapshot.
                self.limit = self.next
            return NOT_OBSERVED_CODE
        snapshot.reference = reference
        return reference

    def count(self, hook: int, n: int = 1) -> None:
        """`n` more calls of a hook."""
        if self.on and hook >= 0:
            try:
                self._fired[hook] += n
            except Exception as error:
                self._fail(error)

    def _append(self, data: bytes) -> int:
        """Put a record into the next slots; its sequence number, -1 if policy or length forbid."""
        size = len(data)
        total = (size + _PAYLOAD - 1) // _PAYLOAD
        first = self.next
        if first + total > self.limit or size > self._longest:
            return -1
        self.next = first + total
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
        else:
            self._put_chain(data, first, total, checksum)
        return first

    def _put_chain(self, data: bytes, first: int, total: int, checksum: int) -> None:
        """A record of any length, also one that goes on at the start of the ring."""
        for position in range(total):
            sequence = first + position
            at = self._slots_offset + sequence % self._slots * _SLOT_BYTES
            part = data[position * _PAYLOAD : position * _PAYLOAD + _PAYLOAD]
            _put(self._map, at, sequence + 1, checksum, position, total, len(data), part)

    def _around_error(self, kind: int) -> None:
        raise NotImplementedError

    def _bad_event(self, kind: int, error: Any) -> None:
        raise NotImplementedError

    def _fail(self, error: Any) -> None:
        raise NotImplementedError
