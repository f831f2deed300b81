"""PT301 to PT304: graph buckets and static buffers against the batch (kind T3)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, rows_of
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array

NO_GRAPHS = "no graph runner was seen; record without --disable-cuda-graph"
NO_GRAPH_PLANS = "no plan for a graph bucket was seen; record without --disable-cuda-graph"
_JUDGING = ("can_run", "can_run_graph", "can_run_cuda_graph")


def keys_agree(evidence: Evidence) -> Evaluation:
    """A batch is judged and replayed by one number."""
    result = Evaluation()
    if _nothing(evidence, "graph", result, NO_GRAPHS):
        return result
    judging = evidence.is_text(evidence.column("graph", "function"), *_JUDGING)
    sizing = present(evidence.column("graph", "bucket_argument")) & ~judging
    rows = np.flatnonzero(sizing)
    judged = np.flatnonzero(judging)
    names = ("process", "batch", "runner")
    order = evidence.column("graph", "enter_seq")
    index = evidence.last_before(
        (evidence.keys("graph", judged, *names), order[judged]),
        (evidence.keys("graph", rows, *names), order[rows]),
    )
    before = np.where(index >= 0, judged[np.maximum(index, 0)], -1) if judged.size else index
    # A batch the judge refused is never sized for a graph.
    refused = evidence.at("graph", "verdict", before) == 0
    left = np.where(refused, NOT_OBSERVED_CODE, evidence.at("graph", "bucket_argument", before))
    hold(
        evidence, result, _place(evidence, rows),
        Side("judged by", left),
        Side("bucket_argument", evidence.column("graph", "bucket_argument")[rows]),
        outcome="the graph may be of another size than the one that was allowed",
    )  # fmt: skip
    return result


def keys_sentence(evidence: Evidence, finding: Finding) -> str:
    runner = evidence.text(int(evidence.column("graph", "runner")[finding.row])) or "a graph runner"
    bucket = wording.number(evidence, "graph", "bucket", finding.row)
    chosen = f" and chose bucket {bucket}" if bucket is not None else ""
    return (
        f"{runner} judged {wording.who(finding)} by {finding.left.value} and sized the graph by "
        f"{finding.right.value}{chosen}"
    )


def bucket_holds(evidence: Evidence) -> Evaluation:
    """The bucket holds the batch, and is one that was captured."""
    result = Evaluation()
    if _nothing(evidence, "graph", result, NO_GRAPHS):
        return result
    rows = rows_of(evidence, "graph")
    bucket = evidence.column("graph", "bucket")
    raw, largest = evidence.column("graph", "raw_bs"), evidence.column("graph", "max_bs")
    place = _place(evidence, rows)
    hold(
        evidence, result, place, Side("raw_bs", raw), Side("bucket", bucket), broken=bucket < raw,
        outcome="requests beyond the bucket are not in the graph",
    )  # fmt: skip
    hold(
        evidence, result, place, Side("max_bs", largest), Side("bucket", bucket),
        broken=bucket > largest, outcome="no graph of this size was captured",
    )  # fmt: skip
    return result


def bucket_sentence(evidence: Evidence, finding: Finding) -> str:
    runner = evidence.text(int(evidence.column("graph", "runner")[finding.row])) or "a graph runner"
    relation = "smaller than" if finding.sign == "shorter" else "larger than"
    what = "the batch" if finding.left.name == "raw_bs" else "the largest captured"
    return (
        f"{runner} chose bucket {finding.right.value} for {wording.who(finding)}, {relation} "
        f"{what} ({finding.left.value})"
    )


def slice_complete(evidence: Evidence) -> Evaluation:
    """The num_splits slice of a graph bucket is as long as it was asked for."""
    result = Evaluation()
    wanted = evidence.column("plan", "num_splits_slice.wanted")
    if _nothing(evidence, "plan", result, NO_GRAPH_PLANS, present(wanted)):
        return result
    place = _graph_plans(evidence)
    taken = evidence.column("plan", "num_splits_slice.rows")
    hold(
        evidence, result, place,
        Side("num_splits_slice.wanted", wanted), Side("num_splits_slice.rows", taken),
        outcome="nothing stops: a slice past the end of a buffer is cut short",
    )  # fmt: skip
    made = evidence.column("plan", "num_splits.rows")
    hold(
        evidence, result, place,
        Side("num_splits_slice.rows", taken), Side("num_splits.rows", made),
        broken=(made == 1) & (taken > 1),
        outcome="nothing stops: a source of one entry is copied to every row",
    )  # fmt: skip
    return result


def slice_sentence(evidence: Evidence, finding: Finding) -> str:
    bucket = wording.number(evidence, "plan", "graph_bucket", finding.row)
    if finding.right.name == "num_splits.rows":
        return (
            f"num_splits of one entry was copied into {finding.left.value} rows of graph bucket "
            f"{bucket}: every row got the same value"
        )
    return (
        f"num_splits slice {finding.right.value}, asked for {finding.right.expected}: the graph "
        f"buffer for bucket {bucket} is too short and the slice was cut"
    )


def planned_for_bucket(evidence: Evidence) -> Evaluation:
    """A graph plan has num_splits for every row of its bucket."""
    result = Evaluation()
    bucket = evidence.column("plan", "graph_bucket")
    if _nothing(evidence, "plan", result, NO_GRAPH_PLANS, present(bucket)):
        return result
    place = _graph_plans(evidence)
    width = _width(evidence, place)
    needed = np.where(present(bucket) & present(width), bucket * width + 1, NOT_OBSERVED_CODE)
    taken = evidence.column("plan", "num_splits_slice.rows")
    made = evidence.column("plan", "num_splits.rows")
    hold(
        evidence, result, place,
        Side("graph_bucket", bucket),
        Side("num_splits_slice.rows", np.where(present(taken), taken, made)),
        expected=needed,
        outcome="the graph reads num_splits that this plan did not write",
    )  # fmt: skip
    return result


def judged_plans(evidence: Evidence) -> Int64Array:
    """Rows of the plans that PT304 can judge."""
    place = _graph_plans(evidence)
    bucket, width = evidence.column("plan", "graph_bucket"), _width(evidence, place)
    made = evidence.column("plan", "num_splits.rows")
    taken = evidence.column("plan", "num_splits_slice.rows")
    judged = present(bucket) & present(width) & (present(taken) | present(made))
    return place.rows[judged]


def planned_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"num_splits {finding.right.value}, needs {finding.right.expected}: planned for graph "
        f"bucket {finding.left.value} of {wording.who(finding)}"
    )


def _width(evidence: Evidence, place: Place) -> Int64Array:
    """Rows each request takes in a graph: the draft width in verify and draft-extend, else 1."""
    assert place.modes is not None
    width = evidence.snapshot("plan", "entry", "spec_info.num_tokens_per_req", place.rows)
    drafted = evidence.snapshot("plan", "entry", "spec_info.draft_token_num", place.rows)
    width = np.where(present(width), width, drafted)
    wide = evidence.is_text(place.modes, "TARGET_VERIFY", "DRAFT_EXTEND_V2", "DRAFT_EXTEND")
    single = evidence.is_text(place.modes, "DECODE", "IDLE")
    return np.where(wide, width, np.where(single, 1, NOT_OBSERVED_CODE))


def _graph_plans(evidence: Evidence) -> Place:
    rows = rows_of(evidence, "plan")
    modes = evidence.snapshot("plan", "entry", "forward_mode", rows)
    return Place("plan", rows, modes, rows)


def _place(evidence: Evidence, rows: Int64Array) -> Place:
    return Place("graph", rows, evidence.snapshot("graph", "entry", "forward_mode", rows))


def _nothing(
    evidence: Evidence,
    kind: str,
    result: Evaluation,
    reason: str,
    seen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None = None,
) -> bool:
    empty = not evidence.count(kind) if seen is None else not bool(seen.any())
    if empty:
        result.skip(reason, max(evidence.count("forward"), 1))
    return empty


CONTRACTS = (
    Contract(
        "PT301",
        "one key for a graph",
        ("T3", "T5"),
        "a graph is judged and sized by the same number",
        Severity.SILENT,
        """
`can_run_graph` decides by one expression whether a batch may run in a graph, `load_batch`, `replay`
or `execute` chooses the bucket by another. One counts requests, the other tokens, and only some
algorithms divide by the draft width: a batch of 4 requests then runs in bucket 16, or asks for a
bucket that was never captured (sglang#33537, sglang#31537).
""",
        keys_agree,
        keys_sentence,
    ),
    Contract(
        "PT302",
        "bucket holds the batch",
        ("T3",),
        "a graph bucket is at least the batch and at most the largest captured",
        Severity.CRASH,
        """
A bucket smaller than the batch leaves requests out of the graph; one larger than the largest
captured does not exist.
""",
        bucket_holds,
        bucket_sentence,
    ),
    Contract(
        "PT303",
        "complete num_splits slice",
        ("T3",),
        "the num_splits slice of a graph bucket has the length it was asked for",
        Severity.SILENT,
        """
The static buffer is cut with `slice(0, n)`. Where it is shorter than n, the slice is shorter and
nothing says so; and a source of one entry copied into it fills every row with the same number.
""",
        slice_complete,
        slice_sentence,
    ),
    Contract(
        "PT304",
        "num_splits of a graph plan",
        ("T3",),
        "a graph plan makes num_splits for every row of its bucket",
        Severity.SILENT,
        """
In a replayed graph no FlashMLA call is seen, so PT101 cannot be judged. The call inside the graph
has the rows it was captured with: bucket times draft width. num_splits must fit those.
""",
        planned_for_bucket,
        planned_sentence,
    ),
)
