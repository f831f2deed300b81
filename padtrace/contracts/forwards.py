"""Which forwards were judged, and of the others why not: what "clean" is earned by.

A forward counts if its attention backend plans rows, that is, makes num_splits. It is judged if
PT101 judged its call, or its plan and the rows that would have reached one; in a replayed graph, if
PT304 judged the plan of its bucket. Everything else has one reason, in words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from padtrace.contracts import graph_buckets, num_splits
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import BoolArray, Forwards
from padtrace.contracts.sites import NO_BOUND, forward_of, pads_of_forwards
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.columns import Int64Array

# Backends that make num_splits, by class; another one shows it by making them in the recording.
PLANNING_BACKENDS = (
    "DeepseekSparseAttnBackend",
    "DeepseekSparseAttnMultiStepBackend",
    "NativeSparseAttnBackend",
    "NativeSparseAttnMultiStepBackend",
    "FlashMLABackend",
    "FlashMLAMultiStepDraftBackend",
)

# Nothing to judge.
PLANS_NONE = "the attention backend plans no rows"
IDLE = "idle: SGLang calls no attention kernel"
NO_ROWS = "the forward has no rows"
NO_SPLITS = "the kernel called takes no num_splits"

# Not judged.
IN_GRAPH = "it ran in a replayed CUDA graph, and no plan of its bucket could be judged"
FAILED = "it failed before a FlashMLA call"
UNFINISHED = "it never ended, and no FlashMLA call of it was recorded"
DROPPED = "events of its rank were dropped"
BACKEND_UNKNOWN = "its attention backend is not known"
UNSEEN = "its lengths were not observed"
LOST = "it is not in the file: its rank's ring was full or torn"
NO_FILE = "its rank left no file (each such rank is counted as one forward)"
NOT_DRIVEN = "not driven"


def count(evidence: Evidence) -> Forwards:
    """Sort every forward of a recording into judged, not judged and nothing to judge."""
    result = Forwards()
    judged = _judged(evidence, result)
    open_forwards = ~judged
    for target, reasons in (
        (result.not_judged, _overruling(evidence)),
        (result.nothing_to_judge, _nothing_to_judge(evidence)),
        (result.not_judged, _not_judged(evidence)),
    ):
        for reason, mask in reasons:
            _add(target, reason, int((open_forwards & mask).sum()))
            open_forwards &= ~mask
    _add(result.not_judged, UNSEEN, int(open_forwards.sum()))
    result.judged += int(judged.sum())
    _outside_of_the_file(evidence, result)
    _not_driven(evidence, result)
    return result


def _add(target: dict[str, int], reason: str, number: int) -> None:
    if number:
        target[reason] = target.get(reason, 0) + number


def _judged(evidence: Evidence, result: Forwards) -> BoolArray:
    """Of each forward whether a contract judged its rows; judged calls of no forward are added."""
    judged = np.zeros(evidence.count("forward"), dtype=np.bool_)
    for sites in num_splits.judged_sites(evidence):
        forwards = forward_of(evidence, sites.kind, sites.rows)
        if sites.kind == "forward":
            forwards = sites.rows
        judged[forwards[forwards >= 0]] = True
        result.judged += int((forwards < 0).sum())
    spoilt = forward_of(evidence, "launch", num_splits.unseen_calls(evidence))
    judged[spoilt[spoilt >= 0]] = False
    graph = evidence.column("forward", "can_run_graph") == 1
    return np.asarray((judged & ~graph) | (graph & _judged_in_graph(evidence)))


def _judged_in_graph(evidence: Evidence) -> BoolArray:
    """Forwards whose last plan before their end was for a graph bucket that PT304 judged."""
    plans = graph_buckets.judged_plans(evidence)
    rows = np.arange(evidence.count("forward"), dtype=np.int64)
    of = evidence.plan_before("forward", rows, _ends(evidence), plans)
    # A plan of an earlier forward on the same batch says nothing of this one.
    began = evidence.at("plan", "enter_seq", of) >= _since(evidence)
    return np.asarray((of >= 0) & began)


def _since(evidence: Evidence) -> Int64Array:
    """Where the events begin that may belong to each forward: the end of the batch's last one."""
    rows = np.arange(evidence.count("forward"), dtype=np.int64)
    entered = evidence.column("forward", "enter_seq")
    keys = evidence.keys("forward", rows, "process", "batch", "worker", "draft_step")
    before = evidence.last_before((keys, entered), (keys, entered))
    return np.where(before >= 0, evidence.at("forward", "exit_seq", before), -1)


def _ends(evidence: Evidence) -> Int64Array:
    end = evidence.column("forward", "exit_seq")
    return np.where(present(end), end, NO_BOUND)


def _overruling(evidence: Evidence) -> list[tuple[str, BoolArray]]:
    """Reasons that hold whatever the backend and the mode: a graph shows nothing of either."""
    known = _backends(evidence)
    plans_none = known.plans_none
    graph = evidence.column("forward", "can_run_graph") == 1
    return [(IN_GRAPH, np.asarray(graph & ~plans_none))]


def _nothing_to_judge(evidence: Evidence) -> list[tuple[str, BoolArray]]:
    rows = np.arange(evidence.count("forward"), dtype=np.int64)
    without = np.zeros(rows.shape, dtype=np.bool_)
    calls = forward_of(evidence, "launch", num_splits.calls_without_splits(evidence))
    without[calls[calls >= 0]] = True
    padded = _padded_rows(evidence)
    called = np.zeros(rows.shape, dtype=np.bool_)
    kernels = forward_of(evidence, "launch", num_splits.kernel_calls(evidence))
    called[kernels[kernels >= 0]] = True
    return [
        (PLANS_NONE, _backends(evidence).plans_none),
        (NO_ROWS, (padded == 0) & ~called),
        (IDLE, evidence.is_text(_modes(evidence), "IDLE") & ~called),
        (NO_SPLITS, without),
    ]


def _not_judged(evidence: Evidence) -> list[tuple[str, BoolArray]]:
    processes = evidence.column("forward", "process")
    dropped = evidence.column("process", "dropped")[processes] > 0
    failed = evidence.column("forward", "failed") == 1
    ended = present(evidence.column("forward", "exit_seq"))
    reasons = [
        (FAILED, failed),
        (UNFINISHED, ~ended),
        (DROPPED, dropped),
        (BACKEND_UNKNOWN, _backends(evidence).unknown),
    ]
    for reason, sites, mask in num_splits.unjudged_sites(evidence):
        found = np.zeros(processes.shape, dtype=np.bool_)
        chosen = sites.rows[mask]
        forwards = chosen if sites.kind == "forward" else forward_of(evidence, sites.kind, chosen)
        found[forwards[forwards >= 0]] = True
        reasons.append((reason, found))
    return reasons


@dataclass(frozen=True, slots=True)
class _Backends:
    """Of each forward what is known of its attention backend."""

    plans_none: BoolArray
    unknown: BoolArray


def _backends(evidence: Evidence) -> _Backends:
    return evidence.once("backends of forwards", _backends_of_forwards)


def _backends_of_forwards(evidence: Evidence) -> _Backends:
    """By the plan of the forward's batch, else by the facts of its worker.

    A class that was seen planning, never made num_splits, and is none of those known to make them,
    plans no rows. One that was only named may wrap another, so nothing is known of it.
    """
    rows = np.arange(evidence.count("forward"), dtype=np.int64)
    plans = np.arange(evidence.count("plan"), dtype=np.int64)
    by_plan = evidence.column("plan", "backend")
    planning = by_plan[present(evidence.column("plan", "num_splits.rows"))]
    names = evidence.at(
        "plan", "backend", evidence.plan_before("forward", rows, _ends(evidence), plans)
    )
    named = names > HIGHEST_ABSENT_CODE
    known = [evidence.text_id(name) for name in PLANNING_BACKENDS]
    makes = named & (np.isin(names, planning) | np.isin(names, known))
    planned = named & np.isin(names, by_plan)
    processes = evidence.column("forward", "process")
    workers = evidence.column("forward", "worker")
    for process in range(evidence.count("process")):
        for worker, facts in evidence.facts(process).workers.items():
            fits = ~named & (processes == process) & (workers == evidence.text_id(worker))
            number = evidence.text_id(facts.backend or "")
            makes[fits] = facts.backend in PLANNING_BACKENDS or number in planning
            planned[fits] = number in by_plan
    return _Backends(np.asarray(~makes & planned), np.asarray(~makes & ~planned))


def _padded_rows(evidence: Evidence) -> Int64Array:
    pads = pads_of_forwards(evidence)
    rows = evidence.snapshot("pad", "exit", "input_ids.rows", pads)
    entry = evidence.snapshot("forward", "entry", "input_ids.rows")
    return np.where(pads >= 0, rows, entry)


def _modes(evidence: Evidence) -> Int64Array:
    """Mode in which attention ran: as the pad left it, since it may turn idle into another."""
    padded = evidence.snapshot("pad", "exit", "forward_mode", pads_of_forwards(evidence))
    own = evidence.column("forward", "forward_mode")
    entry = evidence.snapshot("forward", "entry", "forward_mode")
    return np.where(present(padded), padded, np.where(present(own), own, entry))


def _outside_of_the_file(evidence: Evidence, result: Forwards) -> None:
    """Forwards that were run and are not there: numbers left out, ranks without a file."""
    numbers, processes = (evidence.column("forward", name) for name in ("forward", "process"))
    dropped = evidence.column("process", "dropped")
    for process in np.flatnonzero(dropped > 0):
        own = numbers[(processes == process) & present(numbers)]
        missing = int(own.max()) + 1 - np.unique(own).size if own.size else 0
        # The last ones may be missing too, which no number shows.
        _add(result.not_judged, LOST, max(missing, 1))
    _add(result.not_judged, NO_FILE, len(evidence.coverage.blind.missing_ranks))


def _not_driven(evidence: Evidence, result: Forwards) -> None:
    """A replay's forwards that SGLang's own driver did not run are never judged by it.

    Their reasons take the place of what the file shows of them.
    """
    driven = evidence.coverage.driven
    for reason, number in (driven.not_driven if driven else {}).items():
        if number <= 0:
            continue
        left = number
        for shown in (num_splits.NO_PLAN, *result.not_judged):
            taken = min(left, result.not_judged.get(shown, 0))
            if shown.startswith(NOT_DRIVEN) or not taken:
                continue
            result.not_judged[shown] -= taken
            left -= taken
        result.judged -= min(left, result.judged)
        _add(result.not_judged, f"{NOT_DRIVEN}: {reason}", number)
    result.not_judged = {reason: n for reason, n in result.not_judged.items() if n}
