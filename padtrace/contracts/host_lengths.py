"""PT107: what the host knows of the lengths of one batch agrees with itself (kinds T2 and T7)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, rows_of
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array

_LISTS = ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu")
_OUTCOME = "positions, KV slots and results are laid out by lengths that are not the batch's"


def agree(evidence: Evidence) -> Evaluation:
    """The host's lengths of a new batch do not contradict each other.

    Looked at where the batch is handed on, before anything pads or edits it.
    """
    result = Evaluation()
    rows = rows_of(evidence, "batch")

    def column(name: str) -> Int64Array:
        return evidence.snapshot("batch", "exit", name, rows)

    modes = column("forward_mode")
    place = Place("batch", rows, modes)
    extends = evidence.is_text(modes, "EXTEND", "MIXED")
    # A mixed batch holds decodes, whose cached length may run one step ahead.
    prefill = evidence.is_text(modes, "EXTEND")
    requests, total = column("batch_size"), column("seq_lens_cpu.sum")
    new = evidence.vector_sums(column("extend_seq_lens_cpu"))
    cached = evidence.vector_sums(column("extend_prefix_lens_cpu"))
    entries = {f"entries of {name}": evidence.vector_lengths(column(name)) for name in _LISTS}
    by_requests = [Side(name, values) for name, values in entries.items()]
    by_tokens = [Side(name, column(name)) for name in ("extend_num_tokens", "input_ids.rows")]
    mirror = Side("seq_lens_cpu.rows", column("seq_lens_cpu.rows"))
    pairs = [
        (np.ones_like(extends), Side("batch_size", requests), mirror),
        *((extends, Side("sum of extend_seq_lens_cpu", new), side) for side in by_tokens),
        *((extends, Side("batch_size", requests), side) for side in by_requests),
        (prefill, Side("prefix + extend", _sum(cached, new)), Side("seq_lens_cpu.sum", total)),
        (prefill, Side("seq_lens_cpu.sum", total), Side("seq_lens_sum", column("seq_lens_sum"))),
    ]
    for where, left, right in pairs:
        wanted = Side(left.name, np.where(where, left.values, NOT_OBSERVED_CODE))
        hold(evidence, result, place, wanted, right, outcome=_OUTCOME)
    return result


def _sum(left: Int64Array, right: Int64Array) -> Int64Array:
    known = present(left) & present(right)
    return np.where(known, np.where(known, left, 0) + np.where(known, right, 0), NOT_OBSERVED_CODE)


def sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"{finding.right.name} is {finding.right.value} and {finding.left.name} is "
        f"{finding.left.value} in a new batch of {wording.who(finding)}: its host lengths "
        "contradict each other"
    )


CONTRACT = Contract(
    id="PT107",
    name="host lengths agree",
    kinds=("T2", "T7"),
    rule="the lengths that the host holds of a new batch do not contradict each other",
    severity=Severity.SILENT,
    page="""
`ForwardBatch.init_new` is given lengths in several forms: per request what is cached and what is
new, the whole sequences, their sum, the number of new tokens. In a prefill, cached plus new is the
sequence, the new tokens are the rows of input_ids, and each list has one entry per request. Where
two of them disagree, whoever reads the one lays out rows that the other does not have.
""",
    evaluate=agree,
    sentence=sentence,
)
