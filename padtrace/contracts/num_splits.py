"""PT101: num_splits has one entry more than q has rows (kinds T1 and T2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import BoolArray, Contract, Evaluation, Finding, Severity, Violations
from padtrace.contracts.releases import in_range
from padtrace.contracts.rows import num_splits_expected
from padtrace.contracts.sites import (
    PLANNED,
    Sites,
    forward_of,
    launch_sites,
    modes_of,
    pad_sites,
    planned_before,
    real_rows,
    unpadded_sites,
)
from padtrace.recording.absent import NONE_CODE
from padtrace.recording.columns import Int64Array
from padtrace.recording.model import Recording

IN_GRAPH = "the forward ran in a replayed graph, where no FlashMLA call is seen"
NO_PLAN = "no plan with num_splits was recorded for the forward"
NO_ROWS = "the forward has no rows to plan"
ROWS_UNKNOWN = "the rows of q were not observed"
NO_SPLITS = "the kernel called takes no num_splits"
NO_CALL = "the forward finished without a FlashMLA call that takes num_splits"
OTHER_KERNEL = "prefill runs another kernel (--dsa-prefill-backend)"
Q_CUT = "no call was recorded, and the attention layer may cut a padded prefill to its real rows"
Q_SPLIT = "no call was recorded, and the model splits a context-parallel prefill itself"
GRAPH_PLAN = "the plan was made for a graph bucket (see PT303 and PT304)"

FLASHMLA_KV = "flashmla_kv"
_KERNELS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
_PREFILLS = ("EXTEND", "MIXED", "DRAFT_EXTEND", "SPLIT_PREFILL")
# RadixAttention hands the padded rows on up to this release; 0.5.23 cuts them to the real ones
# (padded_extend_real_tokens).
_LAST_WITH_PADDED_PREFILL = "0.5.20"
_ENTRIES_MORE = num_splits_expected(0)
_PREFILL_BACKEND = ("dsa_prefill_backend", "nsa_prefill_backend")


def evaluate(evidence: Evidence) -> Evaluation:
    """Judge every FlashMLA call, then every forward whose call was not recorded."""
    result = Evaluation()
    failed = evidence.column("launch", "failed") == 1
    for sites, num_splits in _judged(evidence, result):
        result.evaluated += int(sites.rows.size)
        broken = num_splits != _expected(sites.q_rows)
        if sites.kind == "launch":
            stopped = failed[sites.rows]
            _report(evidence, sites, num_splits, broken & stopped, wording.STOPPED, result)
            _report(evidence, sites, num_splits, broken & ~stopped, wording.STOPS, result)
        else:
            _report(evidence, sites, num_splits, broken, wording.WOULD_STOP, result)
    return result


def _expected(q_rows: Int64Array) -> Int64Array:
    return q_rows + _ENTRIES_MORE


def _judged(
    evidence: Evidence, result: Evaluation | None = None
) -> Iterator[tuple[Sites, Int64Array]]:
    """The sites that can be judged with their num_splits; reasons against others to `result`."""
    sorted_out = _sort_out(evidence)
    for reason, _, mask in sorted_out.unjudged:
        if result is not None:
            result.skip(reason, int(mask.sum()))
    yield from sorted_out.judged


@dataclass(frozen=True, slots=True)
class _SortedOut:
    """Sites with their num_splits, and those that cannot be judged by reason (sites, mask)."""

    judged: list[tuple[Sites, Int64Array]]
    unjudged: list[tuple[str, Sites, BoolArray]]


def _sort_out(evidence: Evidence) -> _SortedOut:
    return evidence.once("sites of PT101", _sort_out_sites)


def _sort_out_sites(evidence: Evidence) -> _SortedOut:
    launches = launch_sites(evidence)
    num_splits = evidence.column("launch", "num_splits.rows")
    without = (num_splits == NONE_CODE) & present(launches.q_rows)
    judged = present(num_splits) & present(launches.q_rows)
    found = _SortedOut(
        [(launches.select(judged), num_splits[judged])], [(NO_SPLITS, launches, without)]
    )
    # A call that was seen settles its forward; the plan need not be asked.
    settled = launches.select(judged | without)
    forwards_settled = forward_of(evidence, "launch", settled.rows)
    pads = pad_sites(evidence)
    pads = pads.select(~np.isin(pads.rows, settled.pads))
    forwards = unpadded_sites(evidence)
    forwards = forwards.select(~np.isin(forwards.rows, forwards_settled))
    for sites in (pads, forwards):
        open_sites = np.ones(sites.rows.shape, dtype=np.bool_)
        for reason, mask in _reasons(evidence, sites):
            found.unjudged.append((reason, sites, open_sites & mask))
            open_sites &= ~mask
        chosen = sites.select(open_sites)
        found.judged.append((chosen, evidence.at("plan", "num_splits.rows", chosen.plans)))
    return found


def judged_sites(evidence: Evidence) -> list[Sites]:
    """Calls, pads and forwards that PT101 judged."""
    return [sites for sites, _ in _sort_out(evidence).judged]


def unjudged_sites(evidence: Evidence) -> list[tuple[str, Sites, BoolArray]]:
    """Those it could not judge: reason, sites, and which of them."""
    return _sort_out(evidence).unjudged


def kernel_calls(evidence: Evidence) -> Int64Array:
    """Rows of the calls of attention kernels: not those that prepare one, nor the indexer's."""
    function = evidence.column("launch", "function")
    return np.flatnonzero(evidence.is_text(function, *_KERNELS)).astype(np.int64)


def calls_without_splits(evidence: Evidence) -> Int64Array:
    """Rows of the kernel calls that were given no num_splits."""
    calls = kernel_calls(evidence)
    none = evidence.column("launch", "num_splits.rows")[calls] == NONE_CODE
    return np.asarray(calls[none])


def unseen_calls(evidence: Evidence) -> Int64Array:
    """Rows of the kernel calls of which q or num_splits was not observed."""
    calls = kernel_calls(evidence)
    splits = evidence.column("launch", "num_splits.rows")[calls]
    seen = present(launch_sites(evidence).q_rows[calls])
    return np.asarray(calls[~(seen & (present(splits) | (splits == NONE_CODE)))])


def _reasons(evidence: Evidence, sites: Sites) -> list[tuple[str, BoolArray]]:
    """Why a forward without a recorded call cannot be judged, in order of precedence."""
    forwards = forward_of(evidence, sites.kind, sites.rows)
    in_graph = evidence.at("forward", "can_run_graph", forwards) == 1
    unplanned = sites.plans < 0
    return [
        (IN_GRAPH, in_graph),
        (NO_ROWS, unplanned & (sites.q_rows == 0)),
        (NO_PLAN, unplanned),
        (ROWS_UNKNOWN, ~present(sites.q_rows)),
        (GRAPH_PLAN, present(evidence.at("plan", "graph_bucket", sites.plans))),
        (NO_CALL, _finished_without_call(evidence, forwards)),
        (OTHER_KERNEL, _prefill_elsewhere(evidence, sites)),
        (Q_CUT, _may_be_cut(evidence, sites)),
        (Q_SPLIT, _may_be_split(evidence, sites)),
    ]


def _finished_without_call(evidence: Evidence, forwards: Int64Array) -> BoolArray:
    """Where calls are recorded at all, a finished forward without one made none."""
    watched = bool(present(evidence.column("launch", "num_splits.rows")).any())
    finished = present(evidence.at("forward", "exit_seq", forwards))
    failed = evidence.at("forward", "failed", forwards) == 1
    return np.asarray(finished & ~failed & watched)


def _prefill_elsewhere(evidence: Evidence, sites: Sites) -> BoolArray:
    elsewhere = np.zeros(evidence.count("process"), dtype=np.bool_)
    for process in range(elsewhere.size):
        arguments = evidence.facts(process).server_args
        backend = next((arguments[name] for name in _PREFILL_BACKEND if arguments.get(name)), None)
        # A name that was not recorded is none of the tested releases, so not this one either.
        elsewhere[process] = backend not in (None, FLASHMLA_KV)
    extends = evidence.is_text(modes_of(evidence, sites), "EXTEND", "MIXED")
    return np.asarray(extends & elsewhere[evidence.column(sites.kind, "process")[sites.rows]])


def _prefills(evidence: Evidence, sites: Sites) -> BoolArray:
    modes = evidence.snapshot("pad", "exit", "forward_mode", sites.pads)
    return evidence.is_text(np.where(present(modes), modes, modes_of(evidence, sites)), *_PREFILLS)


def _may_be_cut(evidence: Evidence, sites: Sites) -> BoolArray:
    """Padded prefills whose rows at the call are not those of the pad, or may not be."""
    uncut = np.zeros(evidence.count("process"), dtype=np.bool_)
    for process in range(uncut.size):
        release = evidence.release(process)
        uncut[process] = in_range(release, None, _LAST_WITH_PADDED_PREFILL, unknown=False)
    padded = (sites.pads >= 0) & (sites.q_rows > real_rows(evidence, sites.pads))
    processes = evidence.column(sites.kind, "process")[sites.rows]
    return np.asarray(_prefills(evidence, sites) & padded & ~uncut[processes])


def _may_be_split(evidence: Evidence, sites: Sites) -> BoolArray:
    """Prefills under context parallelism of which this rank's part was not recorded."""
    processes = evidence.column(sites.kind, "process")[sites.rows]
    parallel = evidence.column("process", "attn_cp_size")[processes] > 1
    which = ("pad", "exit", sites.pads)
    if sites.kind == "forward":
        which = ("forward", "entry", sites.rows)
    kind, snapshot, rows = which
    shard = evidence.snapshot(kind, snapshot, "attn_cp_metadata.rows", rows)
    return np.asarray(_prefills(evidence, sites) & parallel & ~present(shard))


def _report(
    evidence: Evidence,
    sites: Sites,
    num_splits: Int64Array,
    broken: BoolArray,
    outcome: str,
    result: Evaluation,
) -> None:
    if not broken.any():
        return
    chosen = sites.select(broken)
    result.violations.append(
        Violations(
            event_kind=chosen.kind,
            rows=chosen.rows,
            left_name="q.rows",
            left=chosen.q_rows,
            right_name="num_splits.rows",
            right=num_splits[broken],
            expected=_expected(chosen.q_rows),
            plans=chosen.plans,
            pads=chosen.pads,
            modes=modes_of(evidence, chosen),
            outcome=outcome,
        )
    )


def sentence(evidence: Evidence, finding: Finding) -> str:
    """`num_splits 7, needs 9: the FlashMLA metadata of ... were planned for 6 rows ...`"""
    head = f"num_splits {finding.right.value}, needs {finding.right.expected}"
    who = wording.who(finding)
    q_rows = finding.left.value
    if finding.plan_row < 0:
        return (
            f"{head}: a FlashMLA call of {who} got q of {q_rows} rows; the plan that made "
            "num_splits was not recorded"
        )
    planned = wording.rows(wording.planned_rows(evidence, finding))
    if finding.pad_row < 0:
        return (
            f"{head}: the FlashMLA metadata of {who} were planned for {planned}, "
            f"the call has q of {q_rows} rows and no pad was recorded"
        )
    return (
        f"{head}: the FlashMLA metadata of {who} were planned for {planned} "
        f"{finding.planned} {wording.pad_made(evidence, finding)}"
    )


@dataclass(frozen=True, slots=True)
class RowPair:
    """Forwards of one kind with the same numbers: rows of q and of num_splits."""

    mode: str
    worker: str
    q_rows: int
    num_splits: int
    planned: str | None

    @property
    def needs(self) -> int:
        return num_splits_expected(self.q_rows)

    @property
    def sign(self) -> str:
        if self.num_splits == self.needs:
            return "agree"
        return "shorter" if self.num_splits < self.needs else "longer"


def row_pairs(recording: Recording) -> list[tuple[RowPair, int]]:
    """Every pair of numbers that PT101 judged and how often, those that disagree first."""
    evidence = Evidence(recording)
    counted: Counter[RowPair] = Counter()
    for sites, num_splits in _judged(evidence):
        worker = evidence.column(sites.kind, "worker")[sites.rows]
        columns = [modes_of(evidence, sites), worker, sites.q_rows, num_splits]
        columns.append(planned_before(evidence, sites.plans, sites.pads))
        distinct, counts = np.unique(np.stack(columns), axis=1, return_counts=True)
        for row, count in zip(distinct.T.tolist(), counts.tolist(), strict=True):
            mode, who, q_rows, splits, before = row
            counted[
                RowPair(
                    mode=evidence.text(mode) or "unknown",
                    worker=evidence.text(who) or "unknown",
                    q_rows=q_rows,
                    num_splits=splits,
                    planned=PLANNED.get(before),
                )
            ] += count
    return sorted(
        counted.items(), key=lambda item: (item[0].sign == "agree", -item[1], item[0].mode)
    )


PAGE = """
Each row of q needs its own entry in num_splits, and one closing entry: num_splits is the running
sum that tells a row where its partial results begin and end.

SGLang counts these rows twice. `prepare_mlp_sync_batch` (with `_pad_inputs_to_size`) decides how
many rows q gets; `cal_padded_tokens`, called by the attention backend when it plans, decides for
how many rows num_splits is made. Neither asks the other. If the plan is made before the pad, or
aligns to other sizes, the two numbers part.

The FlashMLA kernel checks the length and stops: "num_splits must have shape (b+1)".

Judged at every recorded FlashMLA call; where no call was recorded, on the plan and the rows that
would have reached the call. What these rows are is not certain for a padded prefill, which the
attention layer of some releases cuts to its real rows, and for a prefill under context parallelism,
which the model splits: without a recorded call these are not judged.
"""

CONTRACT = Contract(
    id="PT101",
    name="num_splits rows",
    kinds=("T1", "T2"),
    rule="num_splits has one entry more than q has rows",
    severity=Severity.CRASH,
    page=PAGE,
    evaluate=evaluate,
    sentence=sentence,
)
