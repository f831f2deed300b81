"""The wire format against numbers worked out by hand, and round trips of any event."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from padtrace.record import wire
from padtrace.recording import schema
from padtrace.recording.absent import NONE_CODE, NOT_OBSERVED_CODE

INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def events(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Kind, scalars and vector values that agree with each other."""
    kind = draw(st.integers(0, len(schema.EVENT_KINDS) - 1))
    return kind, *draw(numbers(schema.EVENT_KINDS[kind]))


@st.composite
def numbers(draw: st.DrawFn, name: str) -> tuple[list[int], list[int]]:
    """Scalars and vector values of one record; snapshots are none, since there is no ring."""
    scalars = draw(
        st.lists(INT64, min_size=len(wire.layout(name)), max_size=len(wire.layout(name)))
    )
    values: list[int] = []
    for position in wire.ragged(name):
        part = draw(st.none() | st.lists(INT64, max_size=9))
        scalars[position] = NONE_CODE if part is None else len(part)
        values += part or []
    for position in wire.references(name):
        scalars[position] = NOT_OBSERVED_CODE
    return scalars, values


@given(events())
def test_what_is_packed_comes_back(event: tuple[int, list[int], list[int]]) -> None:
    kind, scalars, values = event
    record = wire.unpack(wire.pack(kind, scalars, values))
    assert record == wire.Record(wire.RECORD_EVENT, kind, tuple(scalars), tuple(values))


def test_bytes_of_an_update() -> None:
    kind = schema.EVENT_KINDS.index("launch")
    head = 2 | kind << 8 | 3 << 16
    assert wire.pack_update(kind, 77, (8, 99)) == struct.pack("<4q", head, 77, 8, 99)


def test_layout_has_one_scalar_for_a_snapshot() -> None:
    names = wire.layout("forward")
    start = len(schema.HEADER)
    assert names[0] == "process"
    assert names[start:] == ("entry", "forward_mode", "can_run_graph", "failed")
    assert wire.references("forward") == (start,)
    assert wire.column_index("forward", "can_run_graph") == start + 2


def test_a_snapshot_is_a_record_of_its_own() -> None:
    names = wire.layout(wire.SNAPSHOT)
    assert names == schema.SNAPSHOT.names()
    assert names[0] == "forward_mode"
    assert wire.kind_index(wire.SNAPSHOT) == wire.SNAPSHOT_KIND == len(schema.EVENT_KINDS)


@pytest.mark.parametrize("bad", [2**63, -(2**63) - 1, 1.5, None, "7"])
def test_what_is_no_int64_is_refused(bad: object) -> None:
    scalars: list[object] = [0] * len(wire.layout("ready"))
    scalars[3] = bad
    with pytest.raises(struct.error):
        wire.pack(wire.kind_index("ready"), scalars)  # type: ignore[arg-type]


@given(st.binary(max_size=400))
def test_any_bytes_unpack_to_a_record_or_to_nothing(data: bytes) -> None:
    record = wire.unpack(data)
    if record is not None and record.type == wire.RECORD_EVENT:
        assert wire.pack(record.kind, record.numbers, record.values) == data
