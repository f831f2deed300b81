"""Which rings belong together: one server, one start of it.

A run is named by PADTRACE_RUN; without it, processes of one session on one machine are one. What
other machines recorded of the same server joins it, also where their clocks are far apart; an
earlier run in the same folder does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from padtrace.errors import UsageError
from padtrace.record.ring_reader import Ring, RingHeader

# All nodes of a server start within the time its collective initialisation waits for them.
_SAME_START_NS = 10 * 60 * 1_000_000_000

Ranks = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a ring stands in its server.

    Attributes:
        ranks: replica, pp_rank, tp_rank; None if the process never said.
        world: replicas, pp_size, tp_size; None likewise.
        role: "prefill" or "decode" of a disaggregated server, otherwise None.
    """

    header: RingHeader
    facts: dict[str, Any]
    ranks: Ranks | None
    world: Ranks | None
    role: str | None

    @property
    def path(self) -> Path:
        return self.header.path

    @property
    def run(self) -> str:
        return self.header.run or f"{self.header.host}-{self.header.session}"

    @property
    def global_rank(self) -> int | None:
        if self.ranks is None or self.world is None:
            return None
        replica, pp, tp = self.ranks
        return (replica * self.world[1] + pp) * self.world[2] + tp

    def order(self) -> tuple[str, int, int]:
        rank = self.global_rank
        return self.role or "", 2**31 if rank is None else rank, self.header.time_ns


@dataclass(slots=True)
class Run:
    """The rings of one run, and what is to be said about putting them together."""

    names: list[str]
    places: list[Place]
    notes: list[str] = field(default_factory=list)

    def started_ns(self) -> int:
        return min(place.header.time_ns for place in self.places)


def place_of(ring: Ring) -> Place:
    """Read ranks and sizes out of the facts."""
    parallel = _dict(ring.facts, "parallel")
    process = _dict(ring.facts, "process")
    arguments = _dict(ring.facts, "server_args")
    ranks: Ranks | None = None
    world: Ranks | None = None
    if parallel:
        pp, tp = _int(parallel, "pp_size", 1), _int(parallel, "tp_size", 1)
        plain_dp = 1 if arguments.get("enable_dp_attention") else _int(arguments, "dp_size", 1)
        replica = _int(process, "replica", 0)
        ranks = replica, _int(parallel, "pp_rank", 0), _int(parallel, "tp_rank", 0)
        world = max(plain_dp, replica + 1), pp, tp
    mode = process.get("role") or arguments.get("disaggregation_mode")
    role = mode if mode in ("prefill", "decode") else None
    return Place(ring.header, ring.facts, ranks, world, role)


def choose(places: Sequence[Place], run: str | None) -> tuple[Run, list[tuple[Place, str]]]:
    """One run out of all that are there, and the rings left out with the reason.

    Args:
        run: name of the run; None for the newest.

    Raises:
        UsageError: there is no run of that name.
    """
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place.run, []).append(place)
    runs = [Run([name], members) for name, members in groups.items()]
    runs.sort(key=Run.started_ns, reverse=True)
    if run is not None:
        runs.sort(key=lambda candidate: candidate.names != [run])
        if runs[0].names != [run]:
            names = ", ".join(sorted(groups))
            raise UsageError(f"there is no run {run}", f"the runs here are {names}", "choose one")
    chosen, *rest = runs
    apart = {other.names[0]: _another_start(chosen, other, runs) for other in rest}
    rest.sort(key=lambda other: _distance_ns(chosen, other))
    left_out: list[tuple[Place, str]] = []
    for other in rest:
        reason = apart[other.names[0]] or _why_apart(chosen, other)
        if reason is None:
            chosen.notes.append(f"run {other.names[0]} was joined: other ranks of the same server")
            chosen.names += other.names
            chosen.places += other.places
        else:
            left_out += [(place, reason) for place in other.places]
    chosen.notes += _twice(chosen) + _skews(chosen)
    return chosen, left_out


def missing_ranks(places: Sequence[Place]) -> list[int]:
    """Global ranks of the topology that left no ring; [] if no process knew the topology."""
    missing: list[int] = []
    for role in dict.fromkeys(place.role for place in places):
        mine = [place for place in places if place.role == role]
        sizes = [place.world for place in mine if place.world is not None]
        if sizes:
            replicas, pp, tp = (max(size[i] for size in sizes) for i in range(3))
            seen = {place.global_rank for place in mine}
            missing += [rank for rank in range(replicas * pp * tp) if rank not in seen]
    return missing


def _another_start(chosen: Run, other: Run, runs: Sequence[Run]) -> str | None:
    """None if `other` may be of the same start as `chosen`.

    Clocks of two machines may be hours apart. That is believed where nobody named the runs and
    where, of all runs of the machines of `chosen`, this one started nearest to `other`.
    """
    if _distance_ns(chosen, other) <= _SAME_START_NS:
        return None
    reason = f"it belongs to run {other.names[0]}, which started at another time"
    named = any(place.header.run for place in (*chosen.places, *other.places))
    if named or not _other_clock(chosen, other):
        return reason
    ours = [run for run in runs if run is chosen or not _other_clock(run, chosen)]
    nearest = min(ours, key=lambda run: _distance_ns(run, other))
    return None if nearest is chosen else reason


def _other_clock(one: Run, other: Run) -> bool:
    """Whether two runs were on different machines, as far as both say where they were."""
    first, second = (
        [{place.header.host for place in run.places}, {place.header.boot for place in run.places}]
        for run in (one, other)
    )
    return not any(a & b or "" in a | b for a, b in zip(first, second, strict=True))


def _distance_ns(one: Run, other: Run) -> int:
    return abs(one.started_ns() - other.started_ns())


def _skews(run: Run) -> list[str]:
    """Machines whose clocks, by the starts of their processes, are far from the first one's."""
    started: dict[str, int] = {}
    for place in sorted(run.places, key=Place.order):
        header = place.header
        started[header.host] = min(header.time_ns, started.get(header.host, header.time_ns))
    if not started:
        return []
    first, *others = started
    return [
        f"by its clock {host} started {(started[host] - started[first]) / 1e9:+.0f} s from {first}:"
        " taken for one start with clocks apart (PADTRACE_RUN would name it); its times were not"
        " aligned"
        for host in others
        if abs(started[host] - started[first]) > _SAME_START_NS
    ]


def _why_apart(chosen: Run, other: Run) -> str | None:
    """None if `other` is the same server seen from elsewhere."""
    name = other.names[0]
    worlds = {place.world for place in (*chosen.places, *other.places)}
    if len(worlds) != 1 or None in worlds:
        return f"it belongs to run {name}, whose topology is another or unknown"
    taken = {(place.role, place.ranks) for place in chosen.places}
    if any((place.role, place.ranks) in taken for place in other.places):
        return f"it belongs to run {name}, which has the same ranks"
    if any(place.header.run for place in (*chosen.places, *other.places)) and (
        {place.header.host for place in chosen.places}
        & {place.header.host for place in other.places}
    ):
        return f"it belongs to run {name} of the same machine"
    return None


def _twice(run: Run) -> list[str]:
    seen: dict[tuple[str | None, Ranks], int] = {}
    for place in run.places:
        if place.ranks is not None:
            key = place.role, place.ranks
            seen[key] = seen.get(key, 0) + 1
    return [
        f"{count} rings say they are replica {ranks[0]}, pp rank {ranks[1]}, tp rank {ranks[2]}"
        for (_, ranks), count in seen.items()
        if count > 1
    ]


def _dict(facts: dict[str, Any], key: str) -> dict[str, Any]:
    value = facts.get(key)
    return value if isinstance(value, dict) else {}


def _int(values: dict[str, Any], key: str, default: int) -> int:
    value = values.get(key)
    sound = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 16
    return value if sound and isinstance(value, int) else default
