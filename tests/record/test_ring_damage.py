"""Rings that are damaged, cut off or hostile: typed errors, or what can be believed."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from padtrace.errors import BadRecordingError
from padtrace.record import ring_format as form
from padtrace.record.ring import EventWriter
from padtrace.record.ring_reader import read_header, read_ring, read_static
from tests.record.test_ring import READY, make, numbers, ready


@pytest.fixture
def filled(tmp_path: Path) -> EventWriter:
    writer = make(tmp_path)
    writer.facts({"parallel": {"tp_rank": 1}})
    writer.string("DECODE")
    for number in range(300):
        writer.write(READY, ready(number))
    return writer


def test_a_flipped_bit_in_the_header_is_an_error(filled: EventWriter) -> None:
    whole = filled.path.read_bytes()
    for at in range(form.HEADER.size + form.CHECKSUM.size):
        damaged = bytearray(whole[: form.PAGE])
        damaged[at] ^= 1 << at % 8
        filled.path.write_bytes(damaged)
        with pytest.raises(BadRecordingError):
            read_header(filled.path)


@pytest.mark.parametrize("size", [0, 1, 8, 4095])
def test_a_file_without_a_header_is_an_error(filled: EventWriter, size: int) -> None:
    filled.path.write_bytes(filled.path.read_bytes()[:size])
    with pytest.raises(BadRecordingError):
        read_ring(filled.path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRecordingError):
        read_ring(tmp_path / "none.ring")


def test_a_file_cut_off_gives_what_is_left(filled: EventWriter) -> None:
    whole = filled.path.read_bytes()
    start = form.STATIC_OFFSET + read_header(filled.path)[0].static
    filled.path.write_bytes(whole[: start + 100 * form.SLOT_BYTES + 17])
    ring = read_ring(filled.path)
    assert numbers(ring) == list(range(100))
    assert ring.facts == {"parallel": {"tp_rank": 1}}


def test_a_damaged_string_costs_only_itself(filled: EventWriter) -> None:
    whole = bytearray(filled.path.read_bytes())
    at = whole.index(b"DECODE")
    whole[at] ^= 1
    filled.path.write_bytes(whole)
    ring = read_static(filled.path)
    assert ring.damaged == 1
    assert ring.facts == {"parallel": {"tp_rank": 1}}
    assert list(ring.strings.values()) == ["<string table full>"]


def test_another_event_layout_is_an_error_not_a_misreading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("padtrace.record.wire.schema_digest", lambda: 12345)
    path = make(tmp_path).path
    monkeypatch.undo()
    with pytest.raises(BadRecordingError, match="another event layout"):
        read_ring(path)


@given(st.binary(max_size=3000), st.integers(0, 2**32))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_noise_behind_a_good_header_never_crashes(tmp_path: Path, noise: bytes, seed: int) -> None:
    writer = make(tmp_path)
    whole = bytearray(writer.path.read_bytes())
    draw = random.Random(seed)
    for _ in range(8):
        at = form.HOOKS_OFFSET + draw.randrange(len(whole) - form.HOOKS_OFFSET - len(noise))
        whole[at : at + len(noise)] = noise
    writer.path.write_bytes(whole)
    assert read_ring(writer.path).event_count == 0
    writer.path.unlink()


def test_a_header_that_lies_about_sizes_allocates_nothing(filled: EventWriter) -> None:
    whole = bytearray(filled.path.read_bytes())
    values = list(form.HEADER.unpack_from(whole))
    # file bytes, static bytes, slots: all claim 4 EiB; policy: one there is not.
    values[3:7] = [1 << 62, 1 << 62, 1 << 62, 77]
    fixed = form.HEADER.pack(*values)
    whole[: len(fixed)] = fixed
    struct.pack_into("<I", whole, len(fixed), zlib.crc32(fixed))
    filled.path.write_bytes(whole)
    with pytest.raises(BadRecordingError):
        read_ring(filled.path)
