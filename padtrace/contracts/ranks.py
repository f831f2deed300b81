"""PT401 to PT405: what the ranks of one sync group must agree on (kind T4)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, pad_place, rows_of
from padtrace.contracts.evidence import Evidence, pack, present
from padtrace.contracts.model import BoolArray, Contract, Evaluation, Finding, Severity
from padtrace.contracts.sites import branches_of, pads_of_forwards
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array

ONE_RANK = "one rank alone: nothing to compare with"
MADE = "made from cases, whose counts were given and not exchanged"
SUM_LEN, MAX_LEN = 0, 1
PADDING_MODES = ("SUM_LEN", "MAX_LEN")
_SINGLE_GRAPH_MODES = ("DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")


def same_counts(evidence: Evidence) -> Evaluation:
    """All ranks of a group hold the same per-rank counts in a step."""
    result = Evaluation()
    rows = _aligned(evidence, "sync", rows_of(evidence, "sync"))
    made = _made(evidence)[evidence.column("sync", "process")[rows]]
    result.skip(MADE, int(made.sum()))
    rows = rows[~made]
    counts = evidence.column("sync", "counts_before")[rows]
    known = present(counts)
    pairs = _pairs(evidence, result, "sync", rows[known])
    mine, theirs = (counts[known][side] for side in pairs)
    rows = rows[known]
    # Kept for the sentence: a finding holds one number of each side.
    parted = [rows[side][mine != theirs].tolist() for side in pairs]
    _leaders(evidence).update(zip(*parted, strict=True))
    place = Place("sync", rows[pairs[0]], _modes(evidence, "sync", rows[pairs[0]]))
    at = _first_difference(evidence, mine, theirs)
    hold(
        evidence, result, place,
        Side("counts of the group", _items(evidence, theirs, at)),
        Side("counts_before", _items(evidence, mine, at)),
        broken=mine != theirs, outcome="the collectives of the ranks differ in length",
    )  # fmt: skip
    return result


def _leaders(evidence: Evidence) -> dict[int, int]:
    """Row of each sync to the row it was held against."""
    return evidence.once("syncs held against", lambda _: {})


def _first_difference(evidence: Evidence, left: Int64Array, right: Int64Array) -> Int64Array:
    """Where two vectors first differ: past the shorter one at most; 0 where they do not."""
    at = np.zeros(left.shape, dtype=np.int64)
    for index in np.flatnonzero(left != right):
        mine, theirs = (evidence.recording.vector(int(v[index])) for v in (left, right))
        shared = min(len(mine), len(theirs))
        at[index] = next((i for i in range(shared) if mine[i] != theirs[i]), shared)
    return at


def _items(evidence: Evidence, vectors: Int64Array, at: Int64Array) -> Int64Array:
    """One item of each vector; 0 past its end, where a rank has no count."""
    offsets = evidence.recording.vector_offsets
    lengths = np.diff(offsets)[vectors]
    values = evidence.recording.vector_values
    if not values.size:
        return np.zeros_like(vectors)
    place = np.minimum(offsets[vectors] + at, values.size - 1)
    return np.where(at < lengths, values[place], 0)


def same_buffer(evidence: Evidence) -> Evaluation:
    """All ranks of a group pad to the same gathered buffer."""
    result = Evaluation()
    place = pad_place(evidence)
    rows = _aligned(evidence, "pad", place.rows)
    length = evidence.snapshot("pad", "exit", "global_dp_buffer_len", rows)
    _compare(
        evidence, result, "pad", rows, length,
        "buffer rows of the group", "global_dp_buffer_len", "the gather hangs or mixes up rows",
    )  # fmt: skip
    return result


def same_runner(evidence: Evidence) -> Evaluation:
    """All ranks of a group run a forward in a graph, or none does.

    Decode-like forwards always; prefills, and what runs beside them, where the group voted for the
    prefill graph.
    """
    result = Evaluation()
    rows = _aligned(evidence, "forward", rows_of(evidence, "forward"))
    together = _prefill_graph_together(evidence)[rows]
    modes = evidence.column("forward", "forward_mode")[rows]
    # Otherwise prefill graphs are a matter of each rank alone.
    alike = evidence.is_text(modes, *_SINGLE_GRAPH_MODES) & ~together
    for chosen in (rows[alike], rows[together]):
        graph = evidence.column("forward", "can_run_graph")[chosen]
        _compare(
            evidence, result, "forward", chosen, graph,
            "graph on the group", "can_run_graph", "a rank in a graph waits for one that is not",
        )  # fmt: skip
    return result


def _prefill_graph_together(evidence: Evidence) -> BoolArray:
    """Forwards of a step in which every rank must run the same prefill graph, idle ones too.

    `prepare_mlp_sync_batch` takes MAX_LEN for this where the group voted for the graph
    (can_run_dp_breakable_cuda_graph) and the longest rank fits a captured one.
    """
    pads = pads_of_forwards(evidence)
    mode = evidence.snapshot("pad", "exit", "dp_padding_mode", pads)
    vote = evidence.snapshot("pad", "entry", "can_run_dp_breakable_cuda_graph", pads)
    extends = evidence.snapshot("pad", "entry", "is_extend_in_batch", pads)
    return np.asarray((vote == 1) & (extends == 1) & evidence.is_text(mode, "MAX_LEN"))


def untouched_counts(evidence: Evidence) -> Evaluation:
    """The pad leaves the scheduler's own list of counts as it is."""
    result = Evaluation()
    place = pad_place(evidence)
    changed = evidence.column("pad", "scheduler_list_changed")[place.rows]
    hold(
        evidence, result, place,
        Side("unchanged", np.zeros_like(changed)), Side("scheduler_list_changed", changed),
        outcome="the scheduler goes on with padded counts",
    )  # fmt: skip
    return result


def one_padding_mode(evidence: Evidence) -> Evaluation:
    """The plan and the pad of a forward choose the same padding mode.

    What the plan chose shows in its rows: the longest rank's under MAX_LEN, this rank's own under
    SUM_LEN. Where the two are equal nothing can be told.
    """
    result = Evaluation()
    place = pad_place(evidence)
    order = evidence.column("pad", "enter_seq")[place.rows]
    plans = evidence.plan_before("pad", place.rows, order, evidence.split_plans)
    planned = evidence.at("plan", "planned.rows", plans)
    own = evidence.snapshot("plan", "entry", "input_ids.rows", plans)
    # A draft step plans its branches before their rows are there.
    requests = evidence.snapshot("plan", "entry", "batch_size", plans)
    branches = branches_of(evidence, "plan", plans)
    branched = (branches > 1) & present(requests)
    own = np.where(branched, np.where(branched, requests, 0) * branches, own)
    counts = evidence.snapshot("plan", "entry", "global_num_tokens_cpu", plans)
    longest = evidence.vector_maxima(counts)
    telling = present(planned) & present(own) & present(longest) & (own < longest)
    by_sum, by_max = telling & (planned == own), telling & (planned >= longest)
    mode = evidence.snapshot("pad", "exit", "dp_padding_mode", place.rows)
    is_max, is_sum = evidence.is_text(mode, "MAX_LEN"), evidence.is_text(mode, "SUM_LEN")
    at_pad = np.where(is_max, MAX_LEN, np.where(is_sum, SUM_LEN, NOT_OBSERVED_CODE))
    at_plan = np.where(by_max, MAX_LEN, np.where(by_sum, SUM_LEN, NOT_OBSERVED_CODE))
    known = Place("pad", place.rows, place.modes, plans, place.rows)
    hold(
        evidence,
        result,
        known,
        Side("padding mode of the plan", at_plan),
        Side("padding mode of the pad", at_pad),
        texts=PADDING_MODES,
        outcome="the plan counted rows for another layout of the gathered buffer",
    )
    return result


def counts_sentence(evidence: Evidence, finding: Finding) -> str:
    rows = (finding.row, _leaders(evidence).get(finding.row, finding.row))
    mine, theirs = (evidence.recording.event("sync", row).vector("counts_before") for row in rows)
    return f"rank {finding.rank} holds the counts {mine} where the others hold {theirs}"


def buffer_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"rank {finding.rank} padded {wording.who(finding)} for a gathered buffer of "
        f"{finding.right.value} rows, the others for {finding.left.value}"
    )


def runner_sentence(evidence: Evidence, finding: Finding) -> str:
    way = {0: "eagerly", 1: "in a graph"}
    return (
        f"rank {finding.rank} ran {wording.who(finding)} {way.get(finding.right.value or 0)}, the "
        f"others {way.get(finding.left.value or 0)}"
    )


def untouched_sentence(evidence: Evidence, finding: Finding) -> str:
    before = evidence.snapshot(
        "pad", "entry", "global_num_tokens_cpu", np.array([finding.row], dtype=np.int64)
    )
    after = evidence.snapshot(
        "pad", "exit", "global_num_tokens_cpu", np.array([finding.row], dtype=np.int64)
    )
    lists = [evidence.recording.vector(int(i[0])) if i[0] >= 0 else "?" for i in (before, after)]
    return (
        f"the pad of {wording.who(finding)} edited the scheduler's own list of counts: "
        f"{lists[0]} became {lists[1]}"
    )


def padding_mode_sentence(evidence: Evidence, finding: Finding) -> str:
    planned = wording.planned_rows(evidence, finding)
    return (
        f"{wording.who(finding)} was planned as {finding.left.text} "
        f"({wording.rows(planned)}) and padded as {finding.right.text}: the "
        "padding mode flipped between the plan and the pad"
    )


def _aligned(evidence: Evidence, kind: str, rows: Int64Array) -> Int64Array:
    """Events that can be lined up across ranks: served, in a counted step."""
    serving = evidence.is_text(evidence.column(kind, "phase")[rows], "serve")
    synced = evidence.is_text(evidence.column(kind, "step_source")[rows], "sync")
    steps = evidence.column(kind, "step")[rows]
    return rows[serving & synced & present(steps)]


def _compare(
    evidence: Evidence,
    result: Evaluation,
    kind: str,
    rows: Int64Array,
    values: Int64Array,
    left: str,
    right: str,
    outcome: str,
) -> None:
    """Hold every rank's value against the value of the lowest rank, event by event of a step."""
    known = present(values)
    rows, values = rows[known], values[known]
    mine, theirs = _pairs(evidence, result, kind, rows)
    chosen = rows[mine]
    hold(
        evidence, result, Place(kind, chosen, _modes(evidence, kind, chosen)),
        Side(left, values[theirs]), Side(right, values[mine]), outcome=outcome,
    )  # fmt: skip


def _pairs(
    evidence: Evidence, result: Evaluation, kind: str, rows: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Places in `rows` of each rank's event, and of the lowest rank's it is held against."""
    key, process = _place_in_step(evidence, kind, rows)
    order = np.lexsort((process, key))
    key, process = key[order], process[order]
    rank = evidence.column("process", "global_rank")[process]
    first = np.ones(key.size, dtype=np.bool_)
    first[1:] = key[1:] != key[:-1]
    leader = np.maximum.accumulate(np.where(first, np.arange(key.size), 0))
    alone = first & np.append(first[1:], True) if key.size else first
    result.skip(ONE_RANK, int(alone.sum()))
    # Two cases of one rank are two configurations, not two ranks of a step.
    compared = ~first & (rank != rank[leader])
    return order[compared], order[leader][compared]


def _place_in_step(
    evidence: Evidence, kind: str, rows: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """(group, step, worker, number within the step) as one key, and the process."""
    process = evidence.column(kind, "process")[rows]
    group = [evidence.column("process", name)[process] for name in ("replica", "pp_rank")]
    # Made recordings hold one process per topology; only equal ones share a step.
    sizes = [evidence.column("process", f"{n}_size")[process] for n in ("attn_tp", "attn_dp", "tp")]
    step = evidence.column(kind, "step")[rows]
    worker = evidence.column(kind, "worker")[rows]
    within = pack([process, step, worker])
    entered = evidence.column(kind, "enter_seq")[rows]
    order = np.lexsort((entered, within))
    position = np.arange(rows.size)
    new = np.ones(rows.size, dtype=np.bool_)
    new[1:] = within[order][1:] != within[order][:-1]
    number = np.empty(rows.size, dtype=np.int64)
    number[order] = position - np.maximum.accumulate(np.where(new, position, 0))
    counts = _counts_of_made(evidence, kind, rows, process)
    key = pack([*group, *sizes, step, worker, number, counts]) if rows.size else rows
    return key, process


def _counts_of_made(
    evidence: Evidence, kind: str, rows: Int64Array, process: Int64Array
) -> Int64Array:
    """In made recordings, cases share a step only if they state the same counts."""
    syncs = rows_of(evidence, "sync")
    names = ("process", "batch")
    index = evidence.last_before(
        (evidence.keys("sync", syncs, *names), np.zeros_like(syncs)),
        (evidence.keys(kind, rows, *names), np.ones_like(rows)),
    )
    counts = evidence.at("sync", "counts_before", index)
    return np.where(_made(evidence)[process], counts, NOT_OBSERVED_CODE)


def _made(evidence: Evidence) -> BoolArray:
    processes = range(evidence.count("process"))
    return np.array([evidence.facts(p).case is not None for p in processes], dtype=np.bool_)


def _modes(evidence: Evidence, kind: str, rows: Int64Array) -> Int64Array:
    if kind == "forward":
        return evidence.column("forward", "forward_mode")[rows]
    if kind == "pad":
        return evidence.snapshot("pad", "entry", "forward_mode", rows)
    return np.full(rows.shape, NOT_OBSERVED_CODE, dtype=np.int64)


CONTRACTS = (
    Contract(
        "PT401",
        "same counts on all ranks",
        ("T4",),
        "all ranks of a sync group hold the same per-rank counts in a step",
        Severity.CRASH,
        """
The counts come from one collective and decide the length of every later one. Ranks that hold other
numbers wait for each other for ever (sglang#32182).
""",
        same_counts,
        counts_sentence,
    ),
    Contract(
        "PT402",
        "same gathered buffer",
        ("T4",),
        "all ranks of a sync group pad a forward to the same gathered buffer",
        Severity.CRASH,
        """
Each rank works out the length of the gathered buffer by itself. In a step where one rank verifies
and another prefills, the verifying rank scales the peer's prefill tokens by its own draft width,
and the two buffers differ.
""",
        same_buffer,
        buffer_sentence,
    ),
    Contract(
        "PT403",
        "graph or eager alike",
        ("T4", "T3"),
        "all ranks of a sync group run a decode-like or voted prefill in a graph, or none does",
        Severity.CRASH,
        """
A captured graph holds its collectives; a rank that runs eagerly calls others. The choice must be
made together (sglang#32527, sglang#32209). A prefill graph is a matter of each rank alone, unless
the group voted for it and padded to the longest rank: then idle ranks must run it as well.
""",
        same_runner,
        runner_sentence,
    ),
    Contract(
        "PT404",
        "scheduler's counts untouched",
        ("T4", "T8"),
        "the pad leaves the scheduler's own list of counts as it is",
        Severity.SUSPECT,
        """
Where the batch holds the scheduler's list itself and not a copy, the pad aligns it in place: [3, 5]
becomes [4, 8] for everyone who reads it later (releases 0.5.12 and 0.5.15).
""",
        untouched_counts,
        untouched_sentence,
    ),
    Contract(
        "PT405",
        "one padding mode",
        ("T4", "T8"),
        "the plan and the pad of a forward choose the same padding mode",
        Severity.SILENT,
        """
The plan decides between MAX_LEN and SUM_LEN on the raw counts, the pad on counts aligned to the
attention TP size. Near the limit they choose differently, and the rows differ by far more than an
alignment. The plan's choice shows in its rows where this rank is not the longest.
""",
        one_padding_mode,
        padding_mode_sentence,
    ),
)
