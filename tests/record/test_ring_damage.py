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
from padtrace.record import wire
from padtrace.record.native import Snapshot
from padtrace.record.ring import EventWriter
from padtrace.record.ring_reader import read_header, read_ring, read_static
from padtrace.record.seal import seal
from padtrace.recording.absent import NONE_CODE
from tests.record.test_ring import READY, SYNC, long_sync, make, numbers, ready


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


def forge(path: Path, sequence: int, words: list[int]) -> None:
    """Put a record of any words, with a right checksum, into a slot."""
    header = read_header(path)[0]
    record = struct.pack(f"<{len(words)}Q", *(word % 2**64 for word in words))
    assert len(record) <= form.PAYLOAD_BYTES
    checksum = zlib.crc32(record, form.seed(sequence, len(record)))
    head = form.SLOT_HEAD.pack(sequence + 1, checksum, 0, 1, len(record))
    at = form.STATIC_OFFSET + header.static + sequence % header.slots * form.SLOT_BYTES
    whole = bytearray(path.read_bytes())
    whole[at : at + form.SLOT_BYTES] = (head + record).ljust(form.SLOT_BYTES, b"\0")
    path.write_bytes(whole)


@pytest.mark.parametrize("size", [form.PAGE, 2 * form.PAGE, 2 * form.PAGE + 1, 3 * form.PAGE])
def test_a_file_cut_before_its_slots_has_no_events(filled: EventWriter, size: int) -> None:
    filled.path.write_bytes(filled.path.read_bytes()[:size])
    assert read_ring(filled.path).events == {}


def test_updates_of_events_that_are_gone_say_nothing(tmp_path: Path) -> None:
    writer = make(tmp_path)
    launch, forward = wire.kind_index("launch"), wire.kind_index("forward")
    old = Snapshot([5] * len(wire.SNAPSHOT_NAMES), [])
    for position in wire.ragged(wire.SNAPSHOT):
        old = Snapshot([NONE_CODE if i == position else v for i, v in enumerate(old.scalars)], [])
    scalars = [7] * len(wire.layout("forward"))
    (entry,) = wire.references("forward")
    scalars[entry] = writer.keep(old)
    others = [NONE_CODE] * len(wire.layout("launch"))
    for _ in range(100):
        writer.write(launch, others)
    writer.write(forward, scalars)
    # The snapshot is overwritten before the event that refers to it is.
    slots = read_header(writer.path)[0].slots
    while writer.next < slots + 3:
        writer.write(launch, others)
    writer.update(forward, 7, (wire.column_index("forward", "failed"), 1))
    ring = read_ring(writer.path)
    assert "forward" not in ring.events
    assert len(ring.events["launch"].scalars) > 100


# A count of values below zero, and lengths that only add up after wrapping around.
NEGATIVE = -(1 << 63)


@pytest.mark.parametrize(
    "words",
    [
        [NEGATIVE | wire.RECORD_UPDATE | READY << 8 | 3 << 16, 5, 8, 9],
        [NEGATIVE | wire.RECORD_EVENT | READY << 8 | 15 << 16, *range(15)],
        [wire.RECORD_EVENT | 2**24 << 32 | READY << 8 | 15 << 16, *range(15)],
    ],
)
def test_a_forged_record_is_dropped_and_counted(filled: EventWriter, words: list[int]) -> None:
    before = numbers(read_ring(filled.path))
    forge(filled.path, 300, words)
    ring = read_ring(filled.path)
    assert numbers(ring) == before
    assert ring.damaged == 1


def test_lengths_that_wrap_around_make_no_event(filled: EventWriter) -> None:
    positions = wire.ragged("launch")
    scalars = [0] * len(wire.layout("launch"))
    # Four times 2**62 is nothing in 64 bits, and no value follows.
    for position in positions[:4]:
        scalars[position] = 1 << 62
    head = wire.RECORD_EVENT | wire.kind_index("launch") << 8 | len(scalars) << 16
    assert (len(scalars) + 1) * wire.WORD <= form.PAYLOAD_BYTES
    forge(filled.path, 300, [head, *scalars])
    ring = read_ring(filled.path)
    assert "launch" not in ring.events
    assert ring.damaged == 1


@pytest.mark.parametrize(
    "facts", ['{"a":' * 600 + "1" + "}" * 600, f'{{"server_args": {{"node_rank": {2**70}}}}}']
)
def test_facts_no_server_has_do_not_stop_the_seal(filled: EventWriter, facts: str) -> None:
    data = facts.encode()
    filled._static(form.ENTRY_FACTS, 0, data)
    sealed = seal([filled.path.parent])
    assert sealed.recording.rows("ready") == 300


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_byte_costs_one_event_and_is_counted_as_one(
    tmp_path: Path, seed: int
) -> None:
    """The slots as they are when a kill stops the copy of a record after so many bytes."""
    draw = random.Random(seed)
    writer = make(tmp_path)
    slots = read_header(writer.path)[0].slots
    written, begin = 0, form.STATIC_OFFSET + read_header(writer.path)[0].static
    while writer.next < 3 * slots + draw.randrange(slots):
        writer.write(SYNC, *long_sync(written, draw.randrange(160)))
        written += 1
    for number in range(written, written + 6):
        before, first = writer.path.read_bytes(), writer.next
        writer.write(SYNC, *long_sync(number, draw.randrange(160)))
        after = writer.path.read_bytes()
        torn = bytearray(after[:begin] + before[begin:])
        rows = [row % slots for row in range(first, writer.next)]
        places = [begin + row * form.SLOT_BYTES + i for row in rows for i in range(form.SLOT_BYTES)]
        changed = [at for at in places if before[at] != after[at]]
        for done, at in enumerate(changed, 1):
            torn[at] = after[at]
            # Every byte of a slot's head, and some of what it holds.
            if (at - begin) % form.SLOT_BYTES < form.SLOT_HEAD.size or done % 41 == 0:
                (tmp_path / "torn.ring").write_bytes(torn)
                ring = read_ring(tmp_path / "torn.ring")
                read = numbers(ring, "sync")
                last = number if done == len(changed) else number - 1
                assert read == list(range(read[0], read[-1] + 1))
                assert read[-1] in {last, number}
                assert ring.damaged == (read[-1] < number)
