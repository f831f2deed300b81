"""PT1001 and PT1002: what padded rows do (kind T10), and PT1101: what they hold (kind T11)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Side, hold, pad_place
from padtrace.contracts.evidence import Evidence
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.contracts.sites import real_rows
from padtrace.recording.absent import NOT_OBSERVED_CODE

NEEDS_VALUES = "needs the values of out_cache_loc; record with --tier meta"
NEEDS_LANES = "needs the values of padded graph lanes; record with --tier meta"


def routing_bound(evidence: Evidence) -> Evaluation:
    """num_token_non_padded_cpu is the number of rows before the pad."""
    result = Evaluation()
    place = pad_place(evidence)
    before = real_rows(evidence, place.rows)
    bound = evidence.snapshot("pad", "exit", "num_token_non_padded_cpu", place.rows)
    padded = evidence.snapshot("pad", "exit", "input_ids.rows", place.rows)
    # Under context parallelism and sequence sharding the bound is of this rank's shard.
    sharded = evidence.snapshot("pad", "exit", "attn_cp_metadata.rows", place.rows) >= 0
    hold(
        evidence, result, place,
        Side("rows before the pad", np.where(sharded, NOT_OBSERVED_CODE, before)),
        Side("num_token_non_padded_cpu", bound),
        broken=(bound < before) | (bound > padded),
        outcome="expert routing masks real rows, or lets padded ones take part",
    )  # fmt: skip
    return result


def routing_bound_sentence(evidence: Evidence, finding: Finding) -> str:
    padded = wording.snapshot_number(evidence, "pad", "exit", "input_ids.rows", finding.row)
    return (
        f"num_token_non_padded_cpu is {finding.right.value} for {wording.who(finding)}: "
        f"{finding.left.value} rows are real, {padded} are padded"
    )


def reserved_slots(evidence: Evidence) -> Evaluation:
    """Padded rows write to the reserved slot only."""
    return _skipped(evidence, NEEDS_VALUES)


def lane_values(evidence: Evidence) -> Evaluation:
    """Padded lanes of a graph hold their fill value."""
    return _skipped(evidence, NEEDS_LANES)


def _skipped(evidence: Evidence, reason: str) -> Evaluation:
    result = Evaluation()
    result.skip(reason, max(evidence.count("pad"), 1))
    return result


CONTRACTS = (
    Contract(
        "PT1001",
        "routing mask bound",
        ("T10",),
        "num_token_non_padded_cpu lies between the rows before and after the pad",
        Severity.SILENT,
        """
Expert routing masks rows from this number on. Too small, and real tokens are dropped; too large,
and padding takes part (sglang#28378: a score fell from 0.94 to 0.1).
""",
        routing_bound,
        routing_bound_sentence,
    ),
    Contract(
        "PT1002",
        "padded rows write nowhere",
        ("T10",),
        "padded rows write their KV to the reserved slot only",
        Severity.SILENT,
        """
Padded rows carry slot 0. A writer that does not skip it puts NaN where the next reader looks
(sglang#36207). The slots are values on the device, which tier `shape` does not hold.
""",
        reserved_slots,
    ),
    Contract(
        "PT1101",
        "padded lanes hold fill values",
        ("T11",),
        "each padded lane of a static graph buffer holds its fill value",
        Severity.SILENT,
        """
Lanes beyond the batch keep what an earlier, larger batch left (sglang#10892). Their values are on
the device, which tier `shape` does not hold.
""",
        lane_values,
    ),
)
