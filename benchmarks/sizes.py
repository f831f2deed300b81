"""Bytes per forward and rank, in the ring and sealed, for servers of several sizes.

Every rank is a process of its own with a ring of its own, forked after SGLang is imported. It runs
its own requests through SGLang's functions and then, with padtrace's hooks on, through the cheap
ones; its clock moves on as in a server whose steps take some 25 ms.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

from hooking import Recording, Variants
from scene import Scene
from workload import Layout

from padtrace.record import ring_format as form
from padtrace.record.ring_search import rings_in
from padtrace.record.seal import seal
from padtrace.recording.writer import to_bytes

_RING_BYTES = 32 << 20
_AT_ONCE = 2
_FORWARD_NS = 8_000_000


def layouts(ranks: int) -> list[Layout]:
    """Servers with so many ranks: all data-parallel, and attention TP of 4."""
    found = [Layout(ranks, 1)]
    if ranks % 4 == 0 and ranks > 4:
        found.append(Layout(ranks // 4, 4))
    return found


def sealed_sizes(scene: Scene, folder: Path, forwards: int, ranks: list[int]) -> dict[str, Any]:
    """Bytes per forward and rank; of several layouts with as many ranks, the largest counts."""
    result: dict[str, Any] = {}
    print(f"\n{'bytes a forward and rank':32}{'ring':>10}{'sealed':>10}")
    for count in ranks:
        sealed, in_ring = 0.0, 0.0
        for layout in layouts(count):
            rings = folder / f"rings-{layout.attn_dp}-{layout.attn_tp}"
            record_server(scene, layout, rings, forwards)
            used, size = _sizes(rings, layout.ranks * forwards)
            name = f"{count} ranks (dp {layout.attn_dp}, attention tp {layout.attn_tp})"
            print(f"{name:32}{used:10.0f}{size:10.0f}")
            sealed, in_ring = max(sealed, size), max(in_ring, used)
        result[f"bytes_per_forward_{count}_ranks"] = round(sealed, 1)
        result[f"ring_bytes_per_forward_{count}_ranks"] = round(in_ring, 1)
    return result


def _sizes(rings: Path, forwards: int) -> tuple[float, float]:
    sealed = seal([rings])
    recording = sealed.recording
    if sealed.damaged or sealed.missing_ranks or recording.rows("forward") != forwards:
        raise SystemExit(f"the rings are not whole: {sealed.notes}, {recording.rows('forward')}")
    used = sum(_slots_used(path) for path in rings_in(rings)) * form.SLOT_BYTES
    return used / forwards, len(to_bytes(recording)) / forwards


def _slots_used(path: Path) -> int:
    """Slots that hold something; a slot's sequence number is never 0."""
    data = path.read_bytes()
    fields = form.HEADER.unpack_from(data)
    start = form.STATIC_OFFSET + fields[4]
    numbers = range(start, len(data) - form.SLOT_BYTES + 1, form.SLOT_BYTES)
    return sum(data[at : at + 8] != bytes(8) for at in numbers)


def record_server(
    scene: Scene, layout: Layout, rings: Path, forwards: int, *, eagle: bool = True
) -> None:
    """Record a server into `rings`: one forked process per rank, a few at a time.

    Args:
        forwards: of each rank.
        eagle: whether the server speculates. Without it every batch is planned after its pad.
    """
    running: set[int] = set()
    sys.stdout.flush()
    for rank in range(layout.ranks):
        while len(running) >= _AT_ONCE:
            _wait(running)
        pid = os.fork()
        if pid == 0:
            os._exit(_rank_process(scene, layout, rank, rings, forwards, eagle))
        running.add(pid)
    while running:
        _wait(running)


def _wait(running: set[int]) -> None:
    pid, status = os.wait()
    running.discard(pid)
    if status:
        raise SystemExit(f"the process of a rank ended with status {status}")


def _rank_process(
    scene: Scene, layout: Layout, rank: int, rings: Path, forwards: int, eagle: bool
) -> int:
    try:
        scene.eagle = eagle
        with scene.rank(layout, rank, forwards) as scripts:
            scene.cheapen()
            recording = Recording(rings, _RING_BYTES)
            variants = Variants(recording.hooks)
            variants.install("padtrace", recording.hooks)
            variants.arm("padtrace")
            jitter = random.Random(rank)
            for script in scripts:
                recording.state.clock_offset += _FORWARD_NS + jitter.randrange(_FORWARD_NS // 4)
                scene.drive(script, [])
            recording.writer.close()
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
