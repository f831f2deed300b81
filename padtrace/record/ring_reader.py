"""Reads one ring file, outside the server: whatever state a killed process left it in.

Records are believed only whole: every slot of the chain in place and the checksum over all of it
right. What is torn is counted. Only a file whose header cannot be believed is an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from padtrace.errors import BadRecordingError
from padtrace.record import ring_format as form
from padtrace.record import wire
from padtrace.recording import schema
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array

_SLOT = np.dtype(
    [
        ("sequence", "<u8"),
        ("checksum", "<u4"),
        ("position", "<u2"),
        ("total", "<u2"),
        ("size", "<u4"),
        ("unused", "<u4"),
        ("payload", f"V{form.PAYLOAD_BYTES}"),
    ]
)
_WORDS_PER_SLOT = form.PAYLOAD_BYTES // wire.WORD
_MAX_DEPTH = 64
_ASK_AGAIN = "the other rings still seal; nothing of this one can be had"


@dataclass(frozen=True, slots=True)
class RingHeader:
    """The fixed fields of a ring file; times in ns (wall clock, monotonic clock)."""

    path: Path
    size: int
    static: int
    slots: int
    policy: str
    pid: int
    time_ns: int
    monotonic_ns: int
    schema_digest: int
    run: str
    boot: str
    host: str
    session: str


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook of a process: its state, how often it fired, why it was lost."""

    name: str
    status: str
    target: str
    note: str
    fired: int


@dataclass(frozen=True, slots=True)
class EventBlock:
    """All events of one kind of one ring, in the order in which they were written.

    Attributes:
        scalars: int64, shape (events, len(wire.layout(kind))), updates merged in. A snapshot is
            its row in the block of snapshots, or NOT_OBSERVED.
        values: int64, the vector values of all events, one event after the other.
        starts: int64, shape (events + 1,); event i has `values[starts[i]:starts[i + 1]]`.
    """

    scalars: Int64Array
    values: Int64Array
    starts: Int64Array


@dataclass(slots=True)
class Ring:
    """What one ring file holds.

    Attributes:
        counters: by the names of `ring_format.COUNTERS`.
        strings: text by id; ids of damaged entries are missing.
        facts: all patches merged, in order.
        events: by kind; kinds without events are missing.
        snapshots: the snapshots that events refer to; None if there are none.
        damaged: records that were torn or changed, as far as they can be counted.
    """

    header: RingHeader
    counters: dict[str, int]
    strings: dict[int, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    hooks: list[Hook] = field(default_factory=list)
    events: dict[str, EventBlock] = field(default_factory=dict)
    snapshots: EventBlock | None = None
    damaged: int = 0

    @property
    def event_count(self) -> int:
        return sum(len(block.scalars) for block in self.events.values())


def open_regular(path: Path) -> BinaryIO:
    """A file to read, if it is one: a pipe would block, a device never ends.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(handle, "rb")


def read_header(path: Path) -> tuple[RingHeader, dict[str, int]]:
    """Header and counters only: cheap enough to poll.

    Raises:
        BadRecordingError: this is no ring, or its header is damaged.
    """
    try:
        with open_regular(path) as file:
            return _header(path, file.read(form.PAGE))
    except OSError as error:
        raise _bad(path, str(error.strerror), "check the path and its permissions") from error


def read_static(path: Path) -> Ring:
    """Header, counters, strings, facts and hooks, without the events.

    Raises:
        BadRecordingError: this is no ring, or its header is damaged.
    """
    header, _ = read_header(path)
    try:
        with open_regular(path) as file:
            data = file.read(form.STATIC_OFFSET + header.static)
    except OSError as error:
        raise _bad(path, str(error.strerror), "check the path and its permissions") from error
    return _static(path, data)


def read_ring(path: Path) -> Ring:
    """Everything that can be believed in one ring file, also while it is being written.

    Raises:
        BadRecordingError: this is no ring, its header is damaged, or another version wrote it.
    """
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > form.MAX_BYTES:
                raise _bad(path, f"it has more than {form.MAX_BYTES} bytes", "this is no ring")
            data = file.read()
    except OSError as error:
        raise _bad(path, str(error.strerror), "check the path and its permissions") from error
    ring = _static(path, data)
    if ring.header.schema_digest != wire.schema_digest():
        raise _bad(
            path,
            "it was written by a padtrace with another event layout",
            "seal it with the padtrace that was installed beside the server",
        )
    _read_events(ring, data)
    return ring


def _header(path: Path, page: bytes) -> tuple[RingHeader, dict[str, int]]:
    end = form.HEADER.size
    if len(page) < form.PAGE or page[: len(form.MAGIC)] != form.MAGIC:
        raise _bad(path, "it does not start like a ring", _ASK_AGAIN)
    if form.CHECKSUM.unpack_from(page, end)[0] != zlib.crc32(page[:end]):
        raise _bad(path, "its header does not match its checksum", _ASK_AGAIN)
    (
        _,
        version,
        slot,
        size,
        static,
        slots,
        policy,
        pid,
        wall,
        monotonic,
        digest,
        run,
        boot,
        host,
        session,
    ) = form.HEADER.unpack_from(page)
    if version != form.VERSION or slot != form.SLOT_BYTES:
        raise _bad(path, f"it is a ring of version {version}", "use the padtrace that wrote it")
    sound = (
        size <= form.MAX_BYTES
        and static <= form.MAX_STATIC_BYTES
        and 0 < slots <= (size - form.STATIC_OFFSET - static) // form.SLOT_BYTES
        and policy < len(form.POLICIES)
        and max(pid, wall, monotonic) < 1 << 62
    )
    if not sound:
        raise _bad(path, "its header states sizes no ring can have", _ASK_AGAIN)
    counters = np.frombuffer(page, "<i8", len(form.COUNTERS), form.COUNTERS_OFFSET)
    header = RingHeader(
        path=path,
        size=size,
        static=static,
        slots=slots,
        policy=form.POLICIES[policy],
        pid=pid,
        time_ns=wall,
        monotonic_ns=monotonic,
        schema_digest=digest,
        run=_text(run),
        boot=_text(boot),
        host=_text(host),
        session=_text(session),
    )
    return header, dict(zip(form.COUNTERS, (int(value) for value in counters), strict=True))


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")


def _static(path: Path, data: bytes) -> Ring:
    header, counters = _header(path, data[: form.PAGE])
    ring = Ring(header, counters)
    stated: dict[int, dict[str, Any]] = {}
    for kind, number, payload in _entries(ring, data):
        if kind == form.ENTRY_STRING:
            ring.strings[number] = payload.decode("utf-8", "replace")
        elif kind == form.ENTRY_FACTS:
            with contextlib.suppress(RecursionError):
                merge_facts(ring.facts, _object(payload))
        elif kind == form.ENTRY_HOOK and number < form.MAX_HOOKS:
            stated[number] = _object(payload)
    if len(data) >= form.STATIC_OFFSET:
        counts = np.frombuffer(data, "<i8", 2 * form.MAX_HOOKS, form.HOOKS_OFFSET)
        ring.hooks = [_hook(ring, n, stated[n], counts) for n in sorted(stated)]
    return ring


def _entries(ring: Ring, data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Entries whose checksum is right; a damaged one is skipped if its length leads on."""
    at = form.STATIC_OFFSET
    end = min(at + ring.header.static, len(data))
    while at + form.ENTRY.size <= end:
        length, checksum, kind, number = form.ENTRY.unpack_from(data, at)
        start = at + form.ENTRY.size
        # More strings or hooks than entries fit is a lie that would be allocated.
        if not kind or start + length > end or number > ring.header.static // form.ENTRY.size:
            break
        payload = data[start : start + length]
        if checksum == zlib.crc32(payload, kind << 16 ^ number):
            yield kind, number, payload
        else:
            ring.damaged += 1
        at = start + (length + 7) // 8 * 8


def _object(payload: bytes) -> dict[str, Any]:
    """An object as SGLang's facts are: not deeply nested, its integers those of a column."""
    try:
        value = json.loads(payload, parse_int=_column_integer)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and _depth(value) <= _MAX_DEPTH else {}


def _column_integer(text: str) -> int | str:
    """An integer no column holds is no count of anything, and stays a text."""
    number = int(text) if len(text) < 20 else 1 << 63
    return number if -(1 << 62) < number < 1 << 62 else text


def _depth(value: Any) -> int:
    """How deeply a value is nested; what JSON could nest deeper has failed before."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


def _hook(ring: Ring, number: int, stated: dict[str, Any], counts: Int64Array) -> Hook:
    texts = {key: str(stated.get(key, "")) for key in ("name", "status", "target", "note")}
    fired, lost = (int(counts[number + shift]) for shift in (0, form.MAX_HOOKS))
    if lost > 0:
        texts["status"] = "lost"
        texts["note"] = ring.strings.get(lost - 1, texts["note"])
    if texts["status"] not in form.HOOK_STATUSES:
        texts["status"] = "absent"
    return Hook(fired=max(fired, 0), **texts)


def merge_facts(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """Merge objects into objects, in place; anything else replaces. None is a value like others:
    an argument that SGLang holds as None is not one that this release does not have."""
    for key, value in patch.items():
        below = target.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merge_facts(below, value)
        else:
            target[key] = value


def _read_events(ring: Ring, data: bytes) -> None:
    offset = form.STATIC_OFFSET + ring.header.static
    count = min(ring.header.slots, max(0, len(data) - offset) // form.SLOT_BYTES)
    slots = np.frombuffer(data, _SLOT, count, min(offset, len(data)))
    rows, starts, sizes = _chains(ring, slots, data, offset)
    payload = np.ascontiguousarray(slots["payload"][rows])
    stream = payload.view("<i8").astype(np.int64, copy=False)
    at = starts * _WORDS_PER_SLOT
    heads = stream[at] if at.size else np.empty(0, np.int64)
    kinds = heads >> 8 & 0xFF
    scalars = heads >> 16 & wire.MAX_SCALARS
    values = heads >> 32
    whole = (values >= 0) & ((scalars + values + 1) * wire.WORD == sizes)
    ring.damaged += int((~whole).sum())
    references = slots["sequence"][rows[starts]].astype(np.int64) - 1
    blocks: dict[str, EventBlock] = {}
    for index, kind in enumerate(wire.KINDS):
        width = len(wire.layout(kind))
        mine = whole & (heads & 0xFF == wire.RECORD_EVENT) & (kinds == index)
        fitting = mine & (scalars == width)
        ring.damaged += int((mine & ~fitting).sum())
        if fitting.any():
            fitting[fitting] = _lengths_fit(ring, kind, stream, at[fitting], values[fitting])
        if fitting.any():
            blocks[kind] = _block(kind, stream, at[fitting], values[fitting])
            if kind == wire.SNAPSHOT:
                references = references[fitting]
    ring.snapshots = blocks.pop(wire.SNAPSHOT, None)
    known = references if ring.snapshots is not None else np.empty(0, np.int64)
    told = {kind: _with_snapshots(kind, block, known) for kind, block in blocks.items()}
    ring.events = {kind: block for kind, block in told.items() if len(block.scalars)}
    _apply_updates(ring, stream, at, heads, kinds, scalars, whole)


def _with_snapshots(kind: str, block: EventBlock, references: Int64Array) -> EventBlock:
    """The events whose snapshots are still in the ring, with the rows of these.

    Only the oldest events of a ring can lack theirs: those are overwritten first.

    Args:
        references: what the rows of the block of snapshots are called, ascending.
    """
    there = np.ones(len(block.scalars), dtype=np.bool_)
    for position in wire.references(kind):
        column = block.scalars[:, position]
        taken = column != NOT_OBSERVED_CODE
        row = np.searchsorted(references, column).clip(0, max(0, len(references) - 1))
        found = taken & (references[row] == column) if len(references) else np.zeros_like(taken)
        there &= found | ~taken
        block.scalars[:, position] = np.where(found, row, NOT_OBSERVED_CODE)
    if there.all():
        return block
    counts = np.diff(block.starts)
    starts = np.zeros(int(there.sum()) + 1, dtype=np.int64)
    np.cumsum(counts[there], out=starts[1:])
    return EventBlock(block.scalars[there], block.values[np.repeat(there, counts)], starts)


def _chains(
    ring: Ring, slots: NDArray[np.void], data: bytes, offset: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Whole records, oldest first: rows of their slots, first of these per record, bytes."""
    size = max(1, ring.header.slots)
    number = slots["sequence"].astype(np.int64) - 1
    filled = (number >= 0) & (number % size == np.arange(len(slots)))
    heads = np.flatnonzero(filled & (slots["position"] == 0))
    heads = heads[np.argsort(number[heads], kind="stable")]
    rows: list[int] = []
    starts: list[int] = []
    sizes: list[int] = []
    columns = [slots[name].tolist() for name in ("checksum", "position", "total", "size")]
    numbers = number.tolist()
    for head in heads.tolist():
        chain = _chain(head, numbers, columns, size)
        if chain is None:
            continue
        length = columns[3][head]
        parts = [
            data[at + form.SLOT_HEAD.size : at + form.SLOT_BYTES]
            for at in (offset + row * form.SLOT_BYTES for row in chain)
        ]
        record = b"".join(parts)[:length]
        if zlib.crc32(record, form.seed(numbers[head], length)) == columns[0][head]:
            starts.append(len(rows))
            rows += chain
            sizes.append(length)
    found = np.array(rows, dtype=np.int64)
    _count_torn(ring, slots, number, found)
    return found, np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64)


def _chain(head: int, numbers: list[int], columns: list[list[int]], size: int) -> list[int] | None:
    """Rows of the slots of the record that starts at `head`, or None if one is not in place."""
    checksums, positions, totals, sizes = columns
    total, length = totals[head], sizes[head]
    if not 0 < length <= total * form.PAYLOAD_BYTES or length <= (total - 1) * form.PAYLOAD_BYTES:
        return None
    chain = [head]
    for position in range(1, total):
        row = (head + position) % size
        if (
            row >= len(numbers)
            or numbers[row] != numbers[head] + position
            or positions[row] != position
            or checksums[row] != checksums[head]
        ):
            return None
        chain.append(row)
    return chain


def _count_torn(ring: Ring, slots: NDArray[np.void], number: Int64Array, used: Int64Array) -> None:
    """Slots of no whole record are torn, unless a later lap has overwritten part of theirs."""
    size = max(1, ring.header.slots)
    left = number >= 0
    left[used] = False
    rest = np.flatnonzero(left)
    # A sequence number half written, which fits its place as little as a changed one does.
    misplaced = left & (number % size != np.arange(len(number)))
    torn = len(rest)
    # A killed writer leaves a few; thousands are noise, and not worth telling apart.
    if torn <= form.MAX_CHAIN:
        before = (rest - 1) % max(1, len(number))
        position, total = slots["position"].astype(np.int64), slots["total"].astype(np.int64)
        # The rest of a head half written need not know its place in the chain.
        goes_on = left[before] & (number[rest] == number[before] + 1)
        goes_on &= position[before] + 1 < total[before]
        firsts = rest[~goes_on & ~misplaced[rest]]
        pieces = {int(number[row] - position[row]): int(total[row]) for row in firsts}
        torn = len(pieces)
        for start, slots_of in pieces.items():
            rows = (start + np.arange(min(slots_of, form.MAX_CHAIN))) % size
            rows = rows[rows < len(number)]
            torn -= bool(((number[rows] >= start + size) | misplaced[rows]).any())
    ring.damaged += max(torn, int(misplaced.sum()))


def _lengths_fit(
    ring: Ring, kind: str, stream: Int64Array, at: Int64Array, counts: Int64Array
) -> NDArray[np.bool_]:
    """Whether the lengths in the scalars of each record say how many values follow."""
    positions = np.array(wire.ragged(kind), dtype=np.int64)
    lengths = stream[(at + 1)[:, None] + positions]
    # None longer than all of them, so that the sum cannot wrap around.
    fits: NDArray[np.bool_] = (lengths <= counts[:, None]).all(axis=1)
    fits &= np.maximum(lengths, 0).sum(axis=1) == counts
    ring.damaged += int((~fits).sum())
    return fits


def _block(kind: str, stream: Int64Array, at: Int64Array, counts: Int64Array) -> EventBlock:
    width = len(wire.layout(kind))
    scalars = stream[(at + 1)[:, None] + np.arange(width)]
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    within = np.arange(int(starts[-1])) - np.repeat(starts[:-1], counts)
    values = stream[np.repeat(at + 1 + width, counts) + within]
    return EventBlock(scalars, values, starts)


def _apply_updates(
    ring: Ring,
    stream: Int64Array,
    at: Int64Array,
    heads: Int64Array,
    kinds: Int64Array,
    scalars: Int64Array,
    whole: NDArray[np.bool_],
) -> None:
    """Later updates win; one whose event was overwritten says nothing any more."""
    updates = whole & (heads & 0xFF == wire.RECORD_UPDATE) & (scalars % 2 == 1)
    for index, kind in enumerate(schema.EVENT_KINDS):
        block = ring.events.get(kind)
        mine = updates & (kinds == index)
        if block is None or not mine.any():
            continue
        names = wire.layout(kind)
        enter = block.scalars[:, names.index("enter_seq")]
        order = np.argsort(enter, kind="stable")
        for pairs in range(int(scalars[mine].max()) // 2):
            some = at[mine & (scalars > 2 * pairs + 2)]
            place = np.searchsorted(enter[order], stream[some + 1]).clip(0, len(enter) - 1)
            rows = order[place]
            column = stream[some + 2 + 2 * pairs]
            known = (enter[rows] == stream[some + 1]) & np.isin(column, _updatable(kind))
            value = stream[some + 3 + 2 * pairs]
            block.scalars[rows[known], column[known]] = value[known]


def _updatable(kind: str) -> list[int]:
    """Columns an update can give a value: plain ones."""
    held = {*wire.ragged(kind), *wire.references(kind)}
    return [column for column in range(len(wire.layout(kind))) if column not in held]


def _bad(path: Path, why: str, hint: str) -> BadRecordingError:
    return BadRecordingError(f"bad ring: {path.name}", why, hint)
