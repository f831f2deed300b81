"""PT901 and PT902: columns of page tables (kind T9)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, rows_of
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array


def wide_enough(evidence: Evidence) -> Evaluation:
    """Every page table of a plan reaches the end of the longest sequence."""
    result = Evaluation()
    place = _plans(evidence)
    longest = evidence.column("plan", "max_seq_len_k")
    width = evidence.column("plan", "page_table_1.width")
    hold(
        evidence, result, place, Side("max_seq_len_k", longest), Side("page_table_1.width", width),
        broken=width < longest, outcome="the longest row reads past its table",
    )  # fmt: skip
    pages = evidence.column("plan", "real_page_table.width")
    size = _per_process(evidence, place.rows, "page_size")
    known = present(pages) & present(size)
    reach = np.where(known, pages * np.where(known, size, 0), NOT_OBSERVED_CODE)
    hold(
        evidence, result, place,
        Side("max_seq_len_k", longest), Side("real_page_table reach", reach),
        broken=reach < longest, outcome="the longest row reads past its table",
    )  # fmt: skip
    return result


def within_requests(evidence: Evidence) -> Evaluation:
    """The longest sequence of a plan fits the request-to-token table."""
    result = Evaluation()
    place = _plans(evidence)
    longest = evidence.column("plan", "max_seq_len_k")
    capacity = _per_process(evidence, place.rows, "req_to_token_width")
    hold(
        evidence, result, place,
        Side("max_seq_len_k", longest), Side("req_to_token width", capacity),
        broken=capacity < longest, outcome="the plan gathers past the end of the table",
    )  # fmt: skip
    return result


def sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"{finding.right.name} {finding.right.value}, needs {finding.right.expected}: the longest "
        f"sequence of {wording.who(finding)} does not fit the table"
    )


def _plans(evidence: Evidence) -> Place:
    rows = rows_of(evidence, "plan")
    return Place("plan", rows, evidence.snapshot("plan", "entry", "forward_mode", rows), rows)


def _per_process(evidence: Evidence, rows: Int64Array, name: str) -> Int64Array:
    """A number from the facts of each event's worker."""
    processes = evidence.column("plan", "process")[rows]
    workers = evidence.column("plan", "worker")[rows]
    values = np.full(rows.shape, NOT_OBSERVED_CODE, dtype=np.int64)
    for process in range(evidence.count("process")):
        for worker, facts in evidence.facts(process).workers.items():
            shape = facts.req_to_token_shape
            value = facts.page_size if name == "page_size" else shape[1] if shape[1:] else None
            if value is not None:
                values[(processes == process) & (workers == evidence.text_id(worker))] = value
    return values


CONTRACTS = (
    Contract(
        "PT901",
        "page table width",
        ("T9",),
        "page tables are as wide as the longest sequence, draft tokens included",
        Severity.SILENT,
        """
Near the context limit a table sized by the context length lacks room for the draft tokens of the
last request (sglang#19016, sglang#35985).
""",
        wide_enough,
        sentence,
    ),
    Contract(
        "PT902",
        "request table width",
        ("T9",),
        "the longest sequence of a plan fits the request-to-token table",
        Severity.CRASH,
        """
The page table is gathered from the request-to-token table. A plan for more tokens than that has
columns asks for entries that do not exist (sglang#29516: used 256001, capacity 256000).
""",
        within_requests,
        sentence,
    ),
)
