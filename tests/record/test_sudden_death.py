"""SIGKILL at random moments: every ring seals, and at most the event being written is missing.

The child tells in a file which event it has written last, so what may be missing is known from
outside. It is killed 60 times with the engine at hand, and in a slow test 300 times with either.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from padtrace.record import wire
from padtrace.record.ring import EventWriter
from padtrace.record.ring_reader import read_ring
from padtrace.record.ring_search import remove_folder, rings_in
from padtrace.record.seal import seal
from padtrace.recording import reader, schema
from padtrace.recording.writer import to_bytes
from tests.record.made_events import EVENTS_PER_FORWARD, MadeRank, rank_facts
from tests.record.test_ring import SYNC, long_sync, numbers

ROOT = Path(__file__).resolve().parents[2]


def _die_writing(folder: Path, progress: int) -> None:
    """In the child: write events of all lengths for ever, small ring, so that it wraps."""
    writer = EventWriter.create(folder, size_bytes=256 << 10, run="r")
    writer.facts(rank_facts(tp_rank=0, tp_size=1, dp_size=1))
    done = memoryview(bytearray(8))
    number = 0
    while True:
        scalars, values = long_sync(number, number % 160)
        writer.write(SYNC, scalars, values)
        struct.pack_into("<q", done, 0, number)
        os.pwrite(progress, done, 0)
        number += 1


def kill_often(parent: Path, kills: int, seed: int) -> None:
    """Kill a writing child at random moments; nothing but the event being written is missing."""
    draw = random.Random(seed)
    for attempt in range(kills):
        folder = parent / str(attempt)
        progress = os.open(parent / f"progress{attempt}", os.O_RDWR | os.O_CREAT)
        os.pwrite(progress, struct.pack("<q", -1), 0)
        child = os.fork()
        if child == 0:
            try:
                _die_writing(folder, progress)
            finally:
                os._exit(1)
        while struct.unpack("<q", os.pread(progress, 8, 0))[0] < 0:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        (last,) = struct.unpack("<q", os.pread(progress, 8, 0))
        os.close(progress)
        (path,) = rings_in(folder)
        ring = read_ring(path)
        read = numbers(ring, "sync")
        # `last` was written whole; the next may or may not be there; nothing between is missing.
        assert read[-1] in (last, last + 1)
        assert read == list(range(read[0], read[-1] + 1))
        assert ring.damaged <= 1
        block = ring.events["sync"]
        for i in (0, len(read) // 2, len(read) - 1):
            values = block.values[block.starts[i] : block.starts[i + 1]].tolist()
            assert values == long_sync(read[i], read[i] % 160)[1]
        recording = reader.from_bytes(to_bytes(seal([folder]).recording), "sealed")
        assert recording.rows("sync") == len(read)
        assert recording.process(0)["complete"] == 0
        begun = ring.counters["events"]
        assert recording.process(0)["dropped"] == begun - len(read)
        assert begun - 1 in (last, last + 1)
        remove_folder(folder)


def test_at_most_the_event_being_written_is_lost(tmp_path: Path) -> None:
    kill_often(tmp_path, 60, 20)


@pytest.mark.slow
@pytest.mark.parametrize("native", ["0", "1"])
def test_300_kills_lose_at_most_the_event_being_written(tmp_path: Path, native: str) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.record.test_sudden_death import kill_often\n"
        "kill_often(Path(sys.argv[1]), 300, 21)\n"
    )
    environment = {**os.environ, "PADTRACE_NATIVE": native}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["os._exit(3)", "os.kill(os.getpid(), 11)", "os.abort()"])
def test_other_sudden_ends_lose_nothing(tmp_path: Path, how: str) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from padtrace.record.ring import EventWriter\n"
        "from tests.record.made_events import MadeRank, rank_facts\n"
        "writer = EventWriter.create(Path(sys.argv[1]), size_bytes=4 << 20)\n"
        "writer.facts(rank_facts(tp_rank=0, tp_size=1, dp_size=1))\n"
        "for _ in MadeRank(writer, dp_size=1, attn_tp=1).forwards(50): pass\n"
        f"{how}\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    assert process.returncode != 0
    recording = seal([tmp_path]).recording
    assert sum(recording.rows(kind) for kind in schema.EVENT_KINDS) == 50 * EVENTS_PER_FORWARD


def test_32_processes_write_at_once(tmp_path: Path) -> None:
    children = []
    for rank in range(32):
        child = os.fork()
        if child == 0:
            try:
                writer = EventWriter.create(tmp_path, size_bytes=1 << 20, run="many")
                writer.facts(rank_facts(tp_rank=rank, tp_size=32, dp_size=8))
                made = MadeRank(writer, dp_rank=rank // 4, dp_size=8, attn_tp=4)
                for _ in made.forwards(20 + rank):
                    pass
                writer.close()
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    sealed = seal([tmp_path])
    recording = sealed.recording
    assert (sealed.missing_ranks, sealed.left_out, sealed.damaged) == ([], [], [])
    assert recording.table("process").column("global_rank").tolist() == list(range(32))
    process = recording.table("forward").column("process")
    assert [int((process == rank).sum()) for rank in range(32)] == [20 + r for r in range(32)]
    # Ranks of one DP group record the same batches: equal snapshots are stored once.
    assert recording.rows("snapshot") < recording.rows("forward")
    assert wire.layout("forward")[0] == "process"
