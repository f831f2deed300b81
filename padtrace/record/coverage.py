"""What was seen and what was not, per hook and process: `Recording.coverage`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padtrace.record import wire
from padtrace.record.ring_reader import Ring

_MAX_REASON = 200
# The worst state of a hook in any process is its state in the recording.
_WORST_FIRST = ("lost", "absent", "moved", "found")


def graph_forwards(ring: Ring) -> int:
    """Forwards whose output says they ran in a graph, where hooks inside do not fire."""
    block = ring.events.get("forward")
    if block is None:
        return 0
    column = block.scalars[:, wire.layout("forward").index("can_run_graph")]
    return int((column == 1).sum())


def dropped_events(ring: Ring) -> int:
    """Events begun that cannot be read: overwritten, refused, or torn by the end."""
    return max(0, ring.counters["events"] - ring.event_count)


def coverage_of(
    rings: Sequence[Ring],
    graphs: Sequence[int],
    dropped: Sequence[int],
    missing: Sequence[int],
) -> dict[str, Any]:
    """The coverage of a recording whose process `i` is `rings[i]`.

    Args:
        graphs, dropped: per process, see `graph_forwards` and `dropped_events`.
        missing: global ranks without a ring.
    """
    blind: dict[str, Any] = {
        "graph_forwards": {str(i): n for i, n in enumerate(graphs)},
        "dropped": {str(i): n for i, n in enumerate(dropped) if n},
        "missing_ranks": list(missing),
    }
    for counter in ("refused", "bad", "static_refused"):
        counts = {str(i): ring.counters[counter] for i, ring in enumerate(rings)}
        if any(counts.values()):
            blind[counter] = {process: n for process, n in counts.items() if n}
    damaged = {str(i): ring.damaged for i, ring in enumerate(rings) if ring.damaged}
    if damaged:
        blind["damaged"] = damaged
    coverage = {"hooks": _hooks(rings), "blind": blind}
    moved = {str(i): reason for i, ring in enumerate(rings) if (reason := _moved(ring))}
    if moved:
        coverage["in_shared_memory"] = moved
    return coverage


def _moved(ring: Ring) -> str:
    """Why the ring was kept in shared memory; "" where it was in the folder asked for."""
    recorder = ring.facts.get("recorder")
    reason = recorder.get("in_shared_memory") if isinstance(recorder, dict) else None
    return reason[:_MAX_REASON] if isinstance(reason, str) else ""


def _hooks(rings: Sequence[Ring]) -> dict[str, Any]:
    merged: dict[str, dict[str, Any]] = {}
    for index, ring in enumerate(rings):
        for hook in ring.hooks:
            entry = merged.setdefault(
                hook.name,
                {"status": hook.status, "target": hook.target, "fired": {}, "note": hook.note},
            )
            entry["fired"][str(index)] = hook.fired
            if _WORST_FIRST.index(hook.status) < _WORST_FIRST.index(entry["status"]):
                entry["status"] = hook.status
                entry["note"] = hook.note
            if hook.status == "lost":
                entry.setdefault("lost_in", []).append(index)
    return merged
