"""PT1201 to PT1203: counts for logprobs, and the row a result is taken from (kind T12)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, pad_place, rows_of
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.recording.absent import NOT_OBSERVED_CODE

# Of these the logits processor keeps the last row of each request, of those every row.
LAST_ROW_MODES = ("EXTEND", "MIXED", "DRAFT_EXTEND")
EVERY_ROW_MODES = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
_SINGLE_LAYER = ("EagleVerifyInput", "EagleDraftInput", "EagleDraftExtendInput")


def bounded(evidence: Evidence) -> Evaluation:
    """No rank has more rows with a logprob than rows."""
    result = Evaluation()
    rows = rows_of(evidence, "sync")
    place = Place("sync", rows)
    totals = evidence.vector_sums(evidence.column("sync", "counts_after"))
    logprobs = evidence.vector_sums(evidence.column("sync", "logprob_counts_after"))
    known = present(totals) & present(logprobs)
    hold(
        evidence, result, place,
        Side("rows of all ranks", np.where(known, totals, NOT_OBSERVED_CODE)),
        Side("logprob rows of all ranks", logprobs),
        broken=logprobs > totals,
        outcome="the gather of the logits reads past the rows there are",
    )  # fmt: skip
    return result


def sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"logprob rows {finding.right.value} of all ranks, rows {finding.left.value}: "
        f"{wording.who(finding)} gathers more logits than there are rows"
    )


def owned_rows(evidence: Evidence) -> Evaluation:
    """Every request of a prefill owns a row."""
    result = Evaluation()
    pads = pad_place(evidence)
    forwards = rows_of(evidence, "forward")
    for kind, which, rows in (("forward", "entry", forwards), ("pad", "exit", pads.rows)):
        modes = evidence.snapshot(kind, which, "forward_mode", rows)
        prefill = evidence.is_text(modes, *LAST_ROW_MODES)
        lengths = evidence.snapshot(kind, which, "extend_seq_lens_cpu", rows)
        shortest = evidence.vector_minima(lengths)
        hold(
            evidence, result, Place(kind, rows, modes, None, rows if kind == "pad" else None),
            Side("rows a request needs", np.where(prefill, 1, NOT_OBSERVED_CODE)),
            Side("rows of its shortest request", shortest),
            broken=shortest < 1,
            outcome="its result is taken from the last row of the request before it",
        )  # fmt: skip
    return result


def owned_sentence(evidence: Evidence, finding: Finding) -> str:
    which = "exit" if finding.event == "pad" else "entry"
    snapshot = evidence.recording.event(finding.event, finding.row).snapshot(which) or {}
    return (
        f"a request of {wording.who(finding)} owns no row (extend_seq_lens_cpu "
        f"{shortened(snapshot.get('extend_seq_lens_cpu'))}), and its result is the one of the last "
        "row before it"
    )


def shortened(lengths: object, most: int = 12) -> str:
    """A list of lengths, cut where it is long."""
    if not isinstance(lengths, list) or len(lengths) <= most:
        return str(lengths)
    return f"[{', '.join(map(str, lengths[:most]))}, ... {len(lengths)} in all]"


def widths(evidence: Evidence) -> Evaluation:
    """Where every row gives a logit, a request has as many logprob rows as rows."""
    result = Evaluation()
    place = pad_place(evidence)
    assert place.modes is not None
    tokens = evidence.snapshot("pad", "entry", "spec_info.num_tokens_per_req", place.rows)
    logprobs = evidence.snapshot(
        "pad", "entry", "spec_info.num_tokens_for_logprob_per_req", place.rows
    )
    every = evidence.is_text(place.modes, *EVERY_ROW_MODES)
    kinds = evidence.snapshot("pad", "entry", "spec_info", place.rows)
    every &= evidence.is_text(kinds, *_SINGLE_LAYER)
    several = np.array([_multi_layer(evidence, p) for p in range(evidence.count("process"))])
    if several.size:
        every &= ~several[evidence.column("pad", "process")[place.rows]]
    # With a select_index one row of each request is kept, whatever its width.
    selected = evidence.is_text(place.modes, "DRAFT_EXTEND_V2") & (logprobs == 1)
    hold(
        evidence, result, place,
        Side("num_tokens_per_req", np.where(every, tokens, NOT_OBSERVED_CODE)),
        Side("num_tokens_for_logprob_per_req", logprobs),
        broken=(logprobs != tokens) & ~selected,
        outcome="the ranks gather another number of logits than the processor keeps",
    )  # fmt: skip
    return result


def _multi_layer(evidence: Evidence, process: int) -> bool:
    return bool(evidence.facts(process).server_args.get("enable_multi_layer_eagle"))


def widths_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"{wording.who(finding)} counts {finding.right.value} logprob rows per request and has "
        f"{finding.left.value} rows, of which every one gives a logit"
    )


CONTRACTS = (
    Contract(
        "PT1201",
        "logprob counts",
        ("T12", "T4"),
        "the counts for logprobs are at most the counts of rows",
        Severity.CRASH,
        """
global_num_tokens_for_logprob must count the rows that the logits processor keeps. Counting every
row where it keeps the last one makes the gather read past the end (sglang#12115).
""",
        bounded,
        sentence,
    ),
    Contract(
        "PT1202",
        "a row for every request",
        ("T12",),
        "every request of a prefill owns at least one row",
        Severity.SILENT,
        """
The logits processor takes the result of a prefill request from its last row: the running sum of the
lengths, less one. A request of no rows gets that of the request before it, the first one gets row
-1, which is somebody's too.
""",
        owned_rows,
        owned_sentence,
    ),
    Contract(
        "PT1203",
        "logprob width",
        ("T12", "T5"),
        "a draft's logprob width is its token width, or 1 where a draft-extend keeps one row",
        Severity.CRASH,
        """
The per-rank counts for logprobs are the requests times num_tokens_for_logprob_per_req, those of the
rows times num_tokens_per_req. In a draft decode, a verify and a draft-extend the logits processor
keeps every row, so the two widths must be one; wider or narrower, the gathered logits have another
length than those at hand. A draft-extend with a `select_index` keeps one row per request, and
counts 1. Not judged for multi-layer drafts, which keep rows of their own.
""",
        widths,
        widths_sentence,
    ),
)
