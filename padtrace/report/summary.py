"""What a recording is, in a few numbers: for the head of every report and for `padtrace info`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from padtrace.contracts.evidence import Evidence, present
from padtrace.recording import about, facts, schema
from padtrace.recording.columns import Int64Array
from padtrace.recording.fingerprint_match import fingerprints
from padtrace.recording.model import Recording


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts over one recording.

    `topologies` are texts with the number of ranks that have each; `modes` forwards by worker and
    mode; `events` rows by kind; `first_step` and `last_step` are None without steps.
    """

    source: str
    tier: str
    releases: list[str]
    commits: list[str]
    ranks: list[int]
    missing_ranks: list[int]
    topologies: dict[str, int]
    modes: dict[str, int]
    events: dict[str, int]
    in_graph: int
    failed: int
    steps: int
    first_step: int | None
    last_step: int | None
    dropped: int
    incomplete: int
    fingerprints: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def summarize(recording: Recording) -> Summary:
    """Count what is in a recording."""
    evidence = Evidence(recording)
    steps = _steps(evidence)
    graph = evidence.column("forward", "can_run_graph")
    failed = evidence.column("forward", "failed")
    dropped = evidence.column("process", "dropped")
    return Summary(
        source=evidence.about.source,
        tier=evidence.about.tier,
        releases=releases(recording),
        commits=sorted({named.commit for named in _sglang(recording) if named.commit}),
        ranks=_ranks(evidence),
        missing_ranks=evidence.coverage.blind.missing_ranks,
        topologies=_topologies(evidence),
        modes=_modes(evidence),
        events={kind: recording.rows(kind) for kind in schema.EVENT_KINDS},
        in_graph=int((graph == 1).sum()),
        failed=int((failed == 1).sum()),
        steps=int(steps.size),
        first_step=int(steps[0]) if steps.size else None,
        last_step=int(steps[-1]) if steps.size else None,
        dropped=int(dropped[present(dropped)].sum()),
        incomplete=int((evidence.column("process", "complete") == 0).sum()),
        fingerprints=fingerprints(recording),
    )


def releases(recording: Recording) -> list[str]:
    """The SGLang releases the recording names; a copy or checkout that it ran by its path."""
    stated = about.view(recording.about)
    if stated.sglang_name is not None:
        return [stated.sglang_name]
    named = sorted({named.version for named in _sglang(recording) if named.version})
    return named or ([stated.sglang] if stated.sglang else [])


def case_of(recording: Recording, process: int, batch: int | None) -> str | None:
    """Id of the case a made batch came from."""
    made_from = facts.view(recording.facts[process]).case
    for entry in made_from.cases if made_from else ():
        if entry.batch == batch and entry.id:
            return entry.id
    return None


def _sglang(recording: Recording) -> list[facts.SGLangFacts]:
    return [facts.view(stated).sglang for stated in recording.facts]


def _ranks(evidence: Evidence) -> list[int]:
    ranks = evidence.column("process", "global_rank")
    return sorted({int(rank) for rank in ranks if rank >= 0})


def _steps(evidence: Evidence) -> Int64Array:
    # Not np.unique: its first call imports numpy.ma, a tenth of what this command costs.
    found = [_distinct_values(evidence.column(kind, "step")) for kind in schema.EVENT_KINDS]
    steps = _distinct_values(np.concatenate(found))
    return steps[steps >= 0]


def _distinct_values(values: Int64Array) -> Int64Array:
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if ordered.size else ordered


_SIZES = ("tp", "pp", "attn_dp", "attn_tp", "attn_cp")


def _topologies(evidence: Evidence) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for process in range(evidence.count("process")):
        sizes = []
        for name in _SIZES:
            size = int(evidence.column("process", f"{name}_size")[process])
            if size > 1 or (size == 1 and name == "tp"):
                sizes.append(f"{name} {size}")
        counted[", ".join(sizes) or "unknown"] += 1
    return dict(counted)


def _modes(evidence: Evidence) -> dict[str, int]:
    modes = evidence.column("forward", "forward_mode")
    entry = evidence.snapshot("forward", "entry", "forward_mode")
    modes = np.where(present(modes), modes, entry)
    counted: Counter[str] = Counter()
    for worker in _distinct_values(evidence.column("forward", "worker")):
        of_worker = modes[evidence.column("forward", "worker") == worker]
        for mode in _distinct_values(of_worker):
            names = (evidence.text(int(code)) or "unknown" for code in (worker, mode))
            counted[" ".join(names)] += int((of_worker == mode).sum())
    return dict(counted.most_common())
