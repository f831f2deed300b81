"""The ring: what is written is read, whatever its size; what does not fit is counted."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from padtrace.record import ring_file, wire
from padtrace.record import ring_format as form
from padtrace.record.ring import EVENTS_AFTER_ERROR, EventWriter, RingUnavailable
from padtrace.record.ring_reader import Ring, read_header, read_ring
from padtrace.recording.absent import NONE_CODE, NOT_OBSERVED_CODE
from tests.record.test_wire import events

KIB = 1024
SYNC = wire.kind_index("sync")
READY = wire.kind_index("ready")
ERROR = wire.kind_index("error")
READY_WIDTH = len(wire.layout("ready"))
SYNC_WIDTH = len(wire.layout("sync"))
COUNTS = wire.ragged("sync")[0]
SEQ = wire.layout("ready").index("enter_seq")


def make(folder: Path, size: int = 256 * KIB, policy: str = "last") -> EventWriter:
    return EventWriter.create(folder, size_bytes=size, policy=policy)


def ready(number: int) -> list[int]:
    """A `ready` event that carries its number."""
    scalars = [number] * READY_WIDTH
    scalars[SEQ] = number
    return scalars


def long_sync(number: int, length: int) -> tuple[list[int], list[int]]:
    """A `sync` event with one vector of `length` values."""
    scalars = [number] * SYNC_WIDTH
    for position in wire.ragged("sync"):
        scalars[position] = NONE_CODE
    scalars[COUNTS] = length
    return scalars, [number * 1000 + i for i in range(length)]


def numbers(ring: Ring, kind: str = "ready") -> list[int]:
    block = ring.events.get(kind)
    return [] if block is None else block.scalars[:, SEQ].tolist()


@given(st.lists(events(), max_size=60))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_events_come_back_in_order(
    tmp_path: Path, sequence: list[tuple[int, list[int], list[int]]]
) -> None:
    writer = make(tmp_path)
    for event in sequence:
        writer.write(*event)
    ring = read_ring(writer.path)
    for kind, name in enumerate(wire.schema.EVENT_KINDS):  # type: ignore[attr-defined]
        written = [(scalars, values) for k, scalars, values in sequence if k == kind]
        block = ring.events.get(name)
        read = []
        if block is not None:
            for i, row in enumerate(block.scalars.tolist()):
                read.append((row, block.values[block.starts[i] : block.starts[i + 1]].tolist()))
        assert read == written
    assert (ring.damaged, ring.counters["events"]) == (0, len(sequence))
    writer.path.unlink()


@given(st.lists(st.integers(0, 2500), min_size=1, max_size=80))
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_ring_that_wraps_keeps_the_newest_without_a_gap(
    tmp_path: Path, lengths: list[int]
) -> None:
    writer = make(tmp_path)
    for number, length in enumerate(lengths):
        writer.write(SYNC, *long_sync(number, length))
    ring = read_ring(writer.path)
    read = numbers(ring, "sync")
    assert read == list(range(len(lengths) - len(read), len(lengths)))
    block = ring.events["sync"]
    for i, number in enumerate(read):
        values = block.values[block.starts[i] : block.starts[i + 1]].tolist()
        assert values == long_sync(number, lengths[number])[1]
    # By arithmetic: slots of the kept records and of the first one that is gone fill the ring.
    used = [-(-(1 + SYNC_WIDTH + n) * 8 // form.PAYLOAD_BYTES) for n in lengths]
    kept = sum(used[len(lengths) - len(read) :])
    assert kept <= ring.header.slots
    if len(read) < len(lengths):
        assert kept + used[len(lengths) - len(read) - 1] > ring.header.slots
    assert ring.damaged == 0
    writer.path.unlink()


def test_first_keeps_the_oldest_and_counts_the_rest(tmp_path: Path) -> None:
    writer = make(tmp_path, policy="first")
    slots = read_header(writer.path)[0].slots
    for number in range(slots + 25):
        writer.write(READY, ready(number))
    ring = read_ring(writer.path)
    assert numbers(ring) == list(range(slots))
    assert (ring.counters["events"], ring.counters["refused"]) == (slots + 25, 25)


def test_error_stops_some_events_after_the_first_error(tmp_path: Path) -> None:
    writer = make(tmp_path, policy="error")
    error = [0] * len(wire.layout("error"))
    error[wire.ragged("error")[0]] = NONE_CODE
    for number in range(3000):
        writer.write(READY, ready(number))
    writer.write(ERROR, error)
    for number in range(3000, 6000):
        writer.write(READY, ready(number))
        if number == 3010:
            writer.write(ERROR, error)
    ring = read_ring(writer.path)
    # The second error is one of the events that follow the first.
    assert numbers(ring)[-1] == 3000 + EVENTS_AFTER_ERROR - 2
    assert ring.counters["frozen"] == 1
    assert ring.counters["errors"] == 2
    assert ring.counters["refused"] == 3000 - (EVENTS_AFTER_ERROR - 1)


def test_updates_complete_the_event_they_name(tmp_path: Path) -> None:
    writer = make(tmp_path)
    forward = [5] * len(wire.layout("forward"))
    for position in wire.ragged("forward"):
        forward[position] = NONE_CODE
    seq, entry = (wire.layout("forward").index(name) for name in ("enter_seq", "entry"))
    exit_seq, failed = (wire.column_index("forward", name) for name in ("exit_seq", "failed"))
    for number in (10, 20, 30):
        forward[seq] = number
        forward[entry] = NOT_OBSERVED_CODE
        writer.write(0, forward)
    writer.update(0, 20, (exit_seq, 21, failed, 1))
    writer.update(0, 20, (exit_seq, 22))
    writer.update(0, 999, (exit_seq, 1))
    names = wire.layout("forward")
    scalars = read_ring(writer.path).events["forward"].scalars
    assert scalars[:, names.index("exit_seq")].tolist() == [5, 22, 5]
    assert scalars[:, names.index("failed")].tolist() == [5, 1, 5]


def test_strings_facts_hooks_and_counters(tmp_path: Path) -> None:
    writer = make(tmp_path)
    first = writer.string("DECODE")
    assert writer.string("EXTEND") != first == writer.string("DECODE")
    writer.facts({"parallel": {"tp_rank": 3, "tp_size": 4}, "host": "a"})
    writer.facts({"parallel": {"tp_size": 8}, "host": None})
    hook = writer.hook("pad", "found", "ForwardBatch.prepare_mlp_sync_batch")
    other = writer.hook("ready", "absent", "ForwardBatch.mark_forward_metadata_ready", "before .17")
    writer.count(hook)
    writer.count(hook, 41)
    writer.lost(hook, writer.string("KeyError in the probe"))
    writer.divergence()
    writer.close()
    ring = read_ring(writer.path)
    assert ring.strings[first] == "DECODE"
    assert ring.facts == {"parallel": {"tp_rank": 3, "tp_size": 8}, "host": None}
    assert [(h.name, h.status, h.fired, h.note) for h in ring.hooks] == [
        ("pad", "lost", 42, "KeyError in the probe"),
        ("ready", "absent", 0, "before .17"),
    ]
    assert other == hook + 1
    assert (ring.counters["complete"], ring.counters["divergences"]) == (1, 1)


def test_a_full_string_table_says_so(tmp_path: Path) -> None:
    writer = make(tmp_path)
    identifiers = [writer.string(f"{number:02000d}") for number in range(200)]
    ring = read_ring(writer.path)
    assert ring.strings[identifiers[0]] == f"{0:02000d}"
    assert ring.strings[identifiers[-1]] == "<string table full>"
    # 64 KiB of 256 KiB hold 31 entries of 2016 bytes beside the first.
    assert len([i for i in identifiers if i]) == 32
    assert ring.counters["static_refused"] > 0


def test_file_and_folder_are_private(tmp_path: Path) -> None:
    writer = make(tmp_path / "a" / "b")
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert writer.path.stat().st_blocks * 512 >= 256 * KIB


def test_no_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A small tmpfs needs rights a test does not have, so the kernel's answer is given here; a real
    # refusal is in the next test.
    def full(handle: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ring_file.os, "posix_fallocate", full)
    with pytest.raises(RingUnavailable) as caught:
        make(tmp_path)
    assert "No space left on device" in caught.value.reason
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_refuses_the_ring_not_the_process(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * KIB, limit[1]))
    try:
        with pytest.raises(RingUnavailable) as caught:
            make(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "too large" in caught.value.reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["/proc/no/such", "/dev/null/rings"])
def test_a_folder_that_cannot_be_is_a_reason(where: str) -> None:
    with pytest.raises(RingUnavailable):
        make(Path(where))


@pytest.mark.parametrize("size", [0, 1000, 1 << 40])
def test_sizes_no_ring_can_have(tmp_path: Path, size: int) -> None:
    with pytest.raises(RingUnavailable):
        make(tmp_path, size=size)


def test_events_that_are_none_are_counted_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = make(tmp_path)
    with caplog.at_level(logging.WARNING, "padtrace"):
        for _ in range(3):
            writer.write(READY, [None] * READY_WIDTH)  # type: ignore[list-item]
            writer.update(READY, 1, (1, 2, 3))
        writer.write(READY, ready(7))
    assert len(caplog.records) == 1
    ring = read_ring(writer.path)
    assert (ring.counters["bad"], numbers(ring)) == (6, [7])


def test_an_event_longer_than_a_quarter_of_the_ring_is_refused(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.write(SYNC, *long_sync(1, 20_000))
    writer.write(READY, ready(2))
    ring = read_ring(writer.path)
    assert (numbers(ring), ring.counters["refused"]) == ([2], 1)


def test_a_failure_inside_switches_off_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = make(tmp_path)
    writer._static_limit = None  # type: ignore[assignment]  # no number: the next string fails
    with caplog.at_level(logging.WARNING, "padtrace"):
        for number in range(3):
            writer.string(f"x{number}")
            writer.write(READY, ready(number))
            writer.facts({"a": 1})
            writer.count(0)
    assert numbers(read_ring(writer.path)) == []
    assert not writer.on
    assert len(caplog.records) == 1
    assert "off" in caplog.records[0].getMessage()


def test_a_forked_child_leaves_the_ring_alone(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.write(READY, ready(1))
    child = os.fork()
    if child == 0:
        writer.write(READY, ready(666))
        writer.facts({"child": True})
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    writer.write(READY, ready(2))
    ring = read_ring(writer.path)
    assert numbers(ring) == [1, 2]
    assert (ring.facts, ring.counters["complete"]) == ({}, 0)


def test_threads_do_not_tear_each_other(tmp_path: Path) -> None:
    writer = make(tmp_path, size=8 << 20)

    def work(base: int) -> None:
        for number in range(base, base + 1000):
            writer.write(SYNC, *long_sync(number, 100))

    threads = [threading.Thread(target=work, args=(base,)) for base in (0, 1000, 2000)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(switch)
    ring = read_ring(writer.path)
    assert sorted(numbers(ring, "sync")) == list(range(3000))
    assert ring.damaged == 0


def test_the_folder_may_go_while_recording(tmp_path: Path) -> None:
    writer = make(tmp_path / "rings")
    writer.path.unlink()
    (tmp_path / "rings").rmdir()
    for number in range(2000):
        writer.write(READY, ready(number))
    writer.close()


def test_importing_the_ring_imports_nothing_heavy() -> None:
    code = (
        "import sys; import padtrace.record.ring, padtrace.record.settings;"
        "print(sorted({'numpy', 'msgspec', 'safetensors', 'torch'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_random_flips_never_give_a_changed_event(tmp_path: Path) -> None:
    writer = make(tmp_path)
    written = {number: long_sync(number, number % 120) for number in range(150)}
    for scalars, values in written.values():
        writer.write(SYNC, scalars, values)
    whole = bytearray(writer.path.read_bytes())
    start = form.STATIC_OFFSET + read_header(writer.path)[0].static
    draw = random.Random(7)
    for _ in range(60):
        damaged = bytearray(whole)
        # One of the 512-byte slots that hold events; there are at least 150.
        at = start + draw.randrange(150 * form.SLOT_BYTES)
        damaged[at] ^= 1 << draw.randrange(8)
        writer.path.write_bytes(damaged)
        ring = read_ring(writer.path)
        block = ring.events["sync"]
        read = numbers(ring, "sync")
        # The padding of a slot is no part of its record.
        assert len(read) >= 149
        assert ring.damaged >= 150 - len(read)
        for i, number in enumerate(read):
            values = block.values[block.starts[i] : block.starts[i + 1]].tolist()
            assert (block.scalars[i].tolist(), values) == written[number]
