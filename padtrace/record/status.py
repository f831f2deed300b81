"""How a recording is going, from the headers of its rings: cheap, and silent to the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from padtrace.errors import BadRecordingError
from padtrace.record.ring_reader import read_header, read_static
from padtrace.record.ring_search import rings_in
from padtrace.record.runs import place_of


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a folder of rings.

    Attributes:
        processes: rings that can be read.
        ranks: global ranks seen so far, sorted.
        expected_ranks: ranks the topology has; None until a process has said so.
        forwards: forwards of the rank that has made the most.
        divergences: row contracts the live alarm found broken, all ranks together.
        errors: exceptions that left a hooked function, all ranks together.
        dropped: events refused because a ring was full.
    """

    processes: int = 0
    ranks: tuple[int, ...] = ()
    expected_ranks: int | None = None
    forwards: int = 0
    divergences: int = 0
    errors: int = 0
    dropped: int = 0


@dataclass(slots=True)
class StatusReader:
    """Looks again and again; what cannot change is read once."""

    folder: Path
    run: str | None = None
    _ranks: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def look(self) -> Status:
        processes = forwards = divergences = errors = dropped = 0
        ranks: set[int] = set()
        expected: int | None = None
        for path in rings_in(self.folder):
            try:
                header, counters = read_header(path)
                known = self._rank(path)
            except BadRecordingError:
                continue
            if self.run is not None and header.run != self.run:
                continue
            processes += 1
            forwards = max(forwards, counters["forwards"])
            divergences += counters["divergences"]
            errors += counters["errors"]
            dropped += counters["refused"]
            if known is not None:
                ranks.add(known[0])
                expected = max(expected or 0, known[1])
        return Status(
            processes, tuple(sorted(ranks)), expected, forwards, divergences, errors, dropped
        )

    def _rank(self, path: Path) -> tuple[int, int] | None:
        """Global rank and number of ranks, once the process has said so."""
        if path not in self._ranks:
            place = place_of(read_static(path))
            if place.global_rank is None or place.world is None:
                return None
            replicas, pp, tp = place.world
            self._ranks[path] = place.global_rank, replicas * pp * tp
        return self._ranks[path]


def status(folder: Path, run: str | None = None) -> Status:
    """One look at the rings in `folder`; for repeated looks keep a `StatusReader`."""
    return StatusReader(folder, run).look()
