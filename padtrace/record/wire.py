"""How one event lies in a ring: a head word, then its scalars, then its vector values, all int64.

The head word says what the record is (event or update), its kind and its counts. Scalars follow
`layout`; absent values are the codes of `recording.absent`; a string is an id of the process; a
vector stands in the scalars as its length (or absent code) and its values follow all scalars, in
column order.

A snapshot is a record of its own, of the kind SNAPSHOT, since most events see what the one before
them saw. In an event it stands as a reference, the sequence number of the slot where its record
begins, or as NOT_OBSERVED where nobody took one.

An update completes an event written earlier, named by its kind and `enter_seq`: pairs of (index in
`schema.event_columns(kind)`, value). Plain `struct`, since this runs in the server.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from padtrace.recording import schema

RECORD_EVENT = 1
RECORD_UPDATE = 2

WORD = 8
_KIND_SHIFT = 8
_SCALARS_SHIFT = 16
_VALUES_SHIFT = 32
MAX_SCALARS = (1 << 16) - 1
MAX_VALUES = (1 << 24) - 1

SNAPSHOT_NAMES = schema.SNAPSHOT.names()
# The name of the records that hold snapshots; their kind follows those of the events.
SNAPSHOT = "snapshot"
KINDS = (*schema.EVENT_KINDS, SNAPSHOT)
SNAPSHOT_KIND = len(schema.EVENT_KINDS)

_RAGGED = (schema.ColumnType.VECTOR, schema.ColumnType.STRINGS)


@dataclass(frozen=True, slots=True)
class Field:
    """One scalar of a layout.

    Attributes:
        name: name of the column, such as `entry` or `planned.rows`.
        type: how the integer is to be read.
    """

    name: str
    type: schema.ColumnType


@dataclass(frozen=True, slots=True)
class Record:
    """One record as `unpack` gives it.

    `numbers` are the scalars of an event, or `enter_seq` and then the pairs of an update.
    """

    type: int
    kind: int
    numbers: tuple[int, ...]
    values: tuple[int, ...]


@cache
def kind_index(kind: str) -> int:
    """The number of a kind on the wire: its index in `KINDS`."""
    return KINDS.index(kind)


@cache
def fields(kind: str) -> tuple[Field, ...]:
    """The scalars of one kind of record, in wire order: one for each column."""
    columns = schema.SNAPSHOT.columns if kind == SNAPSHOT else schema.event_columns(kind)
    return tuple(Field(column.name, column.type) for column in columns)


@cache
def layout(kind: str) -> tuple[str, ...]:
    """The names of the scalars of one kind of record, in wire order."""
    return tuple(field.name for field in fields(kind))


@cache
def ragged(kind: str) -> tuple[int, ...]:
    """Positions in `layout(kind)` whose scalar is the length of values that follow."""
    return tuple(i for i, field in enumerate(fields(kind)) if field.type in _RAGGED)


@cache
def references(kind: str) -> tuple[int, ...]:
    """Positions in `layout(kind)` whose scalar refers to the record of a snapshot."""
    snapshot = schema.ColumnType.SNAPSHOT
    return tuple(i for i, field in enumerate(fields(kind)) if field.type is snapshot)


@cache
def column_index(kind: str, name: str) -> int:
    """The number of a column in an update: its index in `schema.event_columns(kind)`."""
    return [column.name for column in schema.event_columns(kind)].index(name)


@cache
def schema_digest() -> int:
    """A positive int64 that changes with any layout, so that seal never misreads a ring."""
    import hashlib

    text = "\n".join(f"{kind}:{','.join(layout(kind))}" for kind in KINDS)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


_words: dict[int, struct.Struct] = {}


def words(count: int) -> struct.Struct:
    """`count` little-endian int64, compiled once."""
    found = _words.get(count)
    if found is None:
        found = _words[count] = struct.Struct(f"<{count}q")
    return found


def pack(kind: int, scalars: Sequence[int], values: Sequence[int] = ()) -> bytes:
    """One event as bytes.

    Raises:
        struct.error: a number is no int64, or there are more than the head word can count.
    """
    scalar_count, value_count = len(scalars), len(values)
    if scalar_count > MAX_SCALARS or value_count > MAX_VALUES:
        raise struct.error("too many numbers for one event")
    head = RECORD_EVENT | kind << 8 | scalar_count << 16 | value_count << 32
    compiled = _words.get(1 + scalar_count + value_count) or words(1 + scalar_count + value_count)
    if value_count:
        return compiled.pack(head, *scalars, *values)
    return compiled.pack(head, *scalars)


def pack_update(kind: int, enter_seq: int, pairs: Sequence[int]) -> bytes:
    """One update as bytes; `pairs` is column index, value, column index, value, ...

    Raises:
        struct.error: a number is no int64, or the pairs are not pairs.
    """
    count = len(pairs)
    if count % 2 or count >= MAX_SCALARS:
        raise struct.error("an update takes pairs of column index and value")
    head = RECORD_UPDATE | kind << 8 | (count + 1) << 16
    return words(count + 2).pack(head, enter_seq, *pairs)


def unpack(data: bytes) -> Record | None:
    """The record in `data`, or None if its counts do not fit its size or its schema."""
    if len(data) < WORD or len(data) % WORD:
        return None
    head, *numbers = words(len(data) // WORD).unpack(data)
    kind = head >> _KIND_SHIFT & 0xFF
    scalar_count = head >> _SCALARS_SHIFT & MAX_SCALARS
    value_count = head >> _VALUES_SHIFT
    if kind >= len(KINDS) or len(numbers) != scalar_count + value_count:
        return None
    record = Record(head & 0xFF, kind, tuple(numbers[:scalar_count]), tuple(numbers[scalar_count:]))
    return record if _fits(record) else None


def _fits(record: Record) -> bool:
    """Counts agree with the layout; values agree with the lengths in the scalars."""
    if record.type == RECORD_UPDATE:
        columns = len(layout(KINDS[record.kind]))
        indices = record.numbers[1::2]
        return len(record.numbers) % 2 == 1 and all(0 <= i < columns for i in indices)
    if record.type != RECORD_EVENT:
        return False
    kind = KINDS[record.kind]
    if len(record.numbers) != len(layout(kind)):
        return False
    lengths = (record.numbers[i] for i in ragged(kind))
    return sum(max(length, 0) for length in lengths) == len(record.values)
