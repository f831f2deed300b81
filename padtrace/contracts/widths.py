"""PT501 to PT503: the draft width, the same wherever rows are counted (kind T5)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, pad_place, rows_of
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array

_WIDE_MODES = ("TARGET_VERIFY", "DRAFT_EXTEND_V2")


def owned_rows(evidence: Evidence) -> Evaluation:
    """After the pad, every row of a wide forward belongs to a request."""
    result = Evaluation()
    place = pad_place(evidence)
    width = evidence.snapshot("pad", "entry", "spec_info.num_tokens_per_req", place.rows)
    requests = evidence.snapshot("pad", "exit", "batch_size", place.rows)
    rows = evidence.snapshot("pad", "exit", "input_ids.rows", place.rows)
    assert place.modes is not None
    wide = evidence.is_text(place.modes, *_WIDE_MODES)
    owned = _product(requests, width)
    hold(
        evidence, result, place,
        Side("rows owned by requests", np.where(wide, owned, NOT_OBSERVED_CODE)),
        Side("padded input_ids.rows", rows),
        outcome="rows of q that no request owns: their metadata are left over from elsewhere",
    )  # fmt: skip
    return result


def owned_sentence(evidence: Evidence, finding: Finding) -> str:
    requests = wording.snapshot_number(evidence, "pad", "exit", "batch_size", finding.row)
    extra = (finding.right.value or 0) - (finding.left.value or 0)
    return (
        f"{wording.rows(extra)} of {finding.right.value} belong to no request: the pad of "
        f"{wording.who(finding)} found {requests} to own {wording.rows(finding.left.value)}"
    )


def scaled_rows(evidence: Evidence) -> Evaluation:
    """Before the pad, a wide forward has batch size times draft width rows."""
    result = Evaluation()
    rows = rows_of(evidence, "forward")
    modes = evidence.snapshot("forward", "entry", "forward_mode", rows)
    for kind, place in (
        ("forward", Place("forward", rows, modes)),
        ("pad", pad_place(evidence)),
    ):
        assert place.modes is not None
        width = evidence.snapshot(kind, "entry", "spec_info.num_tokens_per_req", place.rows)
        requests = evidence.snapshot(kind, "entry", "batch_size", place.rows)
        tokens = evidence.snapshot(kind, "entry", "input_ids.rows", place.rows)
        wide = evidence.is_text(place.modes, *_WIDE_MODES)
        wanted = _product(requests, width)
        hold(
            evidence, result, place,
            Side("batch size x width", np.where(wide, wanted, NOT_OBSERVED_CODE)),
            Side("input_ids.rows", tokens),
            outcome="counts scaled by one width, rows made by another",
        )  # fmt: skip
    return result


def scaled_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"input_ids {finding.right.value}, needs {finding.right.expected}: {wording.who(finding)} "
        "has another number of rows than batch size times draft width"
    )


def captured_width(evidence: Evidence) -> Evaluation:
    """A graph was captured with the width the batch has."""
    result = Evaluation()
    rows = rows_of(evidence, "graph")
    modes = evidence.snapshot("graph", "entry", "forward_mode", rows)
    width = evidence.snapshot("graph", "entry", "spec_info.num_tokens_per_req", rows)
    wide = evidence.is_text(modes, *_WIDE_MODES)
    hold(
        evidence, result, Place("graph", rows, modes),
        Side("draft width", np.where(wide, width, NOT_OBSERVED_CODE)),
        Side("num_tokens_per_bs", evidence.column("graph", "num_tokens_per_bs")),
        outcome="the graph holds another number of rows per request",
    )  # fmt: skip
    return result


def captured_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"a graph captured for {wording.rows(finding.right.value)} per request was asked for "
        f"{wording.who(finding)} with {finding.left.value}"
    )


def _product(left: Int64Array, right: Int64Array) -> Int64Array:
    known = present(left) & present(right)
    return np.where(known, np.where(known, left, 0) * np.where(known, right, 0), NOT_OBSERVED_CODE)


CONTRACTS = (
    Contract(
        "PT501",
        "rows without a request",
        ("T5", "T2"),
        "after the pad a verify or draft-extend has batch size times width rows",
        Severity.SUSPECT,
        """
The pad aligns the rows, then divides by the draft width to find the requests: 20 rows of width 6
are 3 requests, and 2 rows belong to none. Whatever is made per request (page tables, lengths) does
not cover them.
""",
        owned_rows,
        owned_sentence,
    ),
    Contract(
        "PT502",
        "rows before the pad",
        ("T5",),
        "before the pad a verify or draft-extend has batch size times width rows",
        Severity.SILENT,
        """
Scaling, planning, padding and unpadding each multiply by a width of their own: num_tokens_per_req,
draft_token_num, num_steps + 1. One batch must mean the same width everywhere.
""",
        scaled_rows,
        scaled_sentence,
    ),
    Contract(
        "PT503",
        "captured width",
        ("T5", "T3"),
        "a graph is used with the draft width it was captured with",
        Severity.CRASH,
        """
A graph has a fixed number of rows per request. A batch of another width does not fit its buffers.
""",
        captured_width,
        captured_sentence,
    ),
)
