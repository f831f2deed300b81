"""SIGKILL of a live scheduler in mid-decode: the recording seals and names the rank that died."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
from pathlib import Path

import pytest

from padtrace.lab.launcher import LabServer, LabServerError
from padtrace.record.ring_reader import read_static
from padtrace.record.ring_search import rings_in
from padtrace.record.runs import place_of
from padtrace.recording import schema
from tests.live import by_hand

pytestmark = pytest.mark.live
LONG = 400


def pids(rings: Path) -> dict[int, int]:
    """Process id by rank."""
    places = [place_of(read_static(path)) for path in rings_in(rings)]
    return {rank: p.header.pid for p in places if (rank := p.global_rank) is not None}


def decode_until_dead(server: LabServer) -> threading.Thread:
    """Two long requests, one for each data-parallel rank; nobody waits for their answers."""

    def ask(rank: int) -> None:
        try:
            server.request(range(5, 12), max_new_tokens=LONG, routed_dp_rank=rank)
        except (LabServerError, urllib.error.URLError, OSError):
            return

    threads = [threading.Thread(target=ask, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    return threads[0]


@pytest.mark.parametrize(("rank", "more"), [(0, 20), (1, 33), (1, 57)])
def test_a_killed_scheduler_is_named(tmp_path: Path, rank: int, more: int) -> None:
    rings = tmp_path / "rings"
    with by_hand.serving(tmp_path, rings, by_hand.DENSE) as server:
        victim = pids(rings)[rank]
        decode_until_dead(server)
        started = by_hand.forwards(rings)[victim]
        deadline = time.monotonic() + 60
        while by_hand.forwards(rings)[victim] < started + more:
            assert time.monotonic() < deadline, by_hand.log_of(server)[-3000:]
            time.sleep(0.005)
        os.kill(victim, signal.SIGKILL)
        # What the others do now is theirs: some notice, some are ended by SGLang.
        assert server.wait_until_dead(60).state == "died"
        ended = by_hand.forwards(rings)
    recording, said = by_hand.seal(tmp_path, rings)
    # Reading it has checked every digest.
    assert recording.rows("process") == 2
    row = [recording.process(i)["pid"] for i in range(2)].index(victim)
    assert recording.process(row)["global_rank"] == rank
    assert recording.process(row)["complete"] == 0
    process = recording.table("forward").column("process")
    assert int((process == row).sum()) == ended[victim] >= started + more
    # At most the event being written is missing.
    assert recording.coverage["blind"]["dropped"].get(str(row), 0) <= 1
    assert recording.coverage["blind"]["ended_suddenly"] == [rank], said["notes"]
    assert any(f"rank {rank} ended suddenly" in note for note in said["notes"]), said["notes"]
    assert all(recording.rows(kind) for kind in ("forward", "batch", "sync", "pad"))
    assert set(schema.EVENT_KINDS) >= {"error"}
