"""PT1201: counts for logprobs (kind T12)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, rows_of
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.recording.absent import NOT_OBSERVED_CODE


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
)
