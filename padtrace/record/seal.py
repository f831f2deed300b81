"""Makes one recording of the rings of a run: any number of processes, folders and nodes.

Rings of another run, damaged files and missing ranks never go unsaid: they are in `Sealed`, in
the coverage and in the notes of the recording.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from padtrace.errors import BadRecordingError, NothingObservedError
from padtrace.record import endings, ring_search
from padtrace.record.coverage import coverage_of, dropped_events, graph_forwards
from padtrace.record.device_values import layout
from padtrace.record.merge import RingBuilder
from padtrace.record.ring_reader import Ring, read_ring, read_static
from padtrace.record.ring_search import Found, find_rings
from padtrace.record.runs import Place, Run, choose, missing_ranks, place_of
from padtrace.record.values_reader import KeptValues, read_values
from padtrace.recording.absent import Absent
from padtrace.recording.model import Recording, Value
from padtrace.sharing.document import kept as kept_document
from padtrace.sharing.document import without_machines
from padtrace.sharing.rule import kept_facts, node_label

_CLOCK_SET_NS = 100_000_000
_FROM_PARALLEL = (
    "attn_dp_rank",
    "attn_tp_rank",
    "attn_cp_rank",
    "pp_size",
    "tp_size",
    "attn_dp_size",
    "attn_tp_size",
    "attn_cp_size",
)


@dataclass(slots=True)
class Sealed:
    """A recording and what had to be said about making it.

    Attributes:
        damaged: rings that could not be read, one typed error each.
        left_out: rings of other runs, with the reason.
        missing_ranks: global ranks of the topology that left no readable ring.
        notes: one line each, also in `recording.about["notes"]`.
        rings: the files that are in the recording.
        found: all that were looked at.
    """

    recording: Recording
    damaged: list[BadRecordingError] = field(default_factory=list)
    left_out: list[tuple[Path, str]] = field(default_factory=list)
    missing_ranks: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rings: list[Path] = field(default_factory=list)
    found: Found = field(default_factory=Found)


def seal(
    sources: Sequence[Path], *, run: str | None = None, about: Mapping[str, Any] | None = None
) -> Sealed:
    """Merge the rings of one run.

    Args:
        sources: folders with rings, of any number of nodes, or ring files.
        run: which run to take, by name; by default the newest, with what other nodes
            recorded of the same server.
        about: further entries of `Recording.about`.

    Raises:
        UsageError: a source or the run asked for does not exist, or others can change a folder.
        BadRecordingError: there are rings, but none can be read.
        NothingObservedError: there is no ring at all.
    """
    found = find_rings(sources)
    if not found.rings:
        raise NothingObservedError(
            f"no rings in {', '.join(str(source) for source in sources)}",
            "; ".join(found.problems[:1])
            or "no recorded process ran a model, or recording could not start there",
            "look for lines with 'padtrace' in the server's log",
        )
    damaged: list[BadRecordingError] = []
    places: list[Place] = []
    for path in found.rings:
        try:
            places.append(place_of(read_static(path)))
        except BadRecordingError as error:
            damaged.append(error)
    if not places:
        raise damaged[0]
    chosen, others = choose(places, run)
    chosen.notes += found.problems
    sealed = _merge(chosen, others, damaged, dict(about or {}))
    sealed.found = found
    return sealed


def remove_sealed(sealed: Sealed) -> list[str]:
    """Once the recording is safely written: free the shared memory that its rings take.

    Returns one line for each ring in shared memory; rings on a disk stay.
    """
    return ring_search.remove_sealed(sealed.found, sealed.rings)


def _merge(
    chosen: Run,
    others: list[tuple[Place, str]],
    damaged: list[BadRecordingError],
    about: dict[str, Any],
) -> Sealed:
    notes = [f"{error.what}: {error.why}" for error in damaged]
    notes += [f"left out {place.path.name}: {reason}" for place, reason in others]
    notes += chosen.notes
    builder = RingBuilder(_about(chosen, about, notes))
    shifts = _clock_shifts(chosen.places, notes)
    rings: list[Ring] = []
    graphs: list[int] = []
    dropped: list[int] = []
    kept: list[Place] = []
    ends: list[endings.Ending] = []
    for place in sorted(chosen.places, key=lambda p: p.order()):
        try:
            ring = read_ring(place.path)
        except BadRecordingError as error:
            damaged.append(error)
            notes.append(f"{error.what}: {error.why}")
            continue
        shift = shifts[place.path]
        facts = kept_facts(ring.facts)
        builder.add_ring(_process_values(place, ring, shift), facts, ring, shift)
        graphs.append(graph_forwards(ring))
        dropped.append(dropped_events(ring))
        ends.append(endings.ending_of(ring, place.global_rank))
        # They are in the builder now; the events of many rings would fill the memory.
        ring.events.clear()
        ring.snapshots = None
        rings.append(ring)
        kept.append(place)
    if not rings:
        raise damaged[0]
    missing = missing_ranks(kept)
    if missing:
        notes.append(f"no ring of rank {', '.join(map(str, missing))}")
    notes += endings.notes(ends)
    coverage = coverage_of(rings, graphs, dropped, missing)
    coverage["blind"]["ended_suddenly"] = endings.ended_suddenly(ends)
    recording = builder.finish(coverage)
    _add_values(recording, kept, notes)
    machines = {p.header.host: p.header for p in (*chosen.places, *(p for p, _ in others))}
    labels = {host: node_label(host, header.boot) for host, header in machines.items()}
    recording = kept_document(without_machines(recording, labels))
    told = recording.about["notes"]
    left_out = [(place.path, reason) for place, reason in others]
    taken = [place.path for place in kept]
    return Sealed(recording, damaged, left_out, missing, told, taken)


def _add_values(recording: Recording, places: Sequence[Place], notes: list[str]) -> None:
    """What tiers `meta` and `full` kept beside the rings."""
    kept: dict[int, KeptValues] = {}
    for process, place in enumerate(places):
        path = place.path.with_suffix(layout.SUFFIX)
        if path.exists():
            kept[process] = read_values(path, process)
    for process, values in kept.items():
        recording.values.update(values.tensors)
        if values.problem:
            notes.append(f"no values of process {process}: {values.problem}")
    if kept:
        counters = {str(process): values.counters for process, values in kept.items()}
        recording.coverage["blind"]["values"] = counters


def _process_values(place: Place, ring: Ring, shift_ns: int) -> dict[str, Value]:
    values: dict[str, Value] = {
        "pid": place.header.pid,
        "started_ns": place.header.time_ns + shift_ns,
        "complete": ring.counters["complete"] == 1,
        "dropped": dropped_events(ring),
        "role": place.role,
    }
    rank = place.global_rank
    if rank is None or place.ranks is None:
        return values
    parallel = place.facts["parallel"]
    arguments = place.facts.get("server_args")
    node = arguments.get("node_rank") if isinstance(arguments, dict) else None
    values["global_rank"] = rank
    values["node"] = node if isinstance(node, int) else Absent.NOT_OBSERVED
    values["replica"], values["pp_rank"], values["tp_rank"] = place.ranks
    for name in _FROM_PARALLEL:
        value = parallel.get(name)
        if isinstance(value, int):
            values[name] = value
    return values


def _clock_shifts(places: Sequence[Place], notes: list[str]) -> dict[Path, int]:
    """Per ring, what to add to its times (ns) so that one machine has one clock.

    Within one boot the monotonic clocks are the same clock, so the pair of the first process
    serves all: a wall clock set between two starts would move them against each other.
    """
    reference: dict[tuple[str, str], int] = {}
    shifts: dict[Path, int] = {}
    for place in sorted(places, key=lambda p: p.header.monotonic_ns):
        header = place.header
        offset = header.time_ns - header.monotonic_ns
        first = reference.setdefault((header.host, header.boot), offset) if header.boot else offset
        shifts[place.path] = first - offset
        if abs(first - offset) > _CLOCK_SET_NS:
            seconds = (offset - first) / 1e9
            notes.append(
                f"the clock of {header.host} was set by {seconds:+.1f} s while processes started;"
                " their times were aligned by its monotonic clock"
            )
    return shifts


def _about(run: Run, more: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    facts = [place.facts for place in run.places]
    about: dict[str, Any] = {
        "source": "server",
        "tier": _first(facts, "recorder", "tier") or "shape",
        "sglang": _first(facts, "sglang", "version"),
        "created_ns": time.time_ns(),
        "started_ns": run.started_ns(),
        "run": run.names[0],
    }
    about.update(more)
    about["notes"] = notes
    return about


def _first(facts: Sequence[dict[str, Any]], group: str, key: str) -> Any:
    for one in facts:
        part = one.get(group)
        if isinstance(part, dict) and part.get(key) is not None:
            return part[key]
    return None
