"""PT1001 and PT1002: what padded rows do (kind T10), and PT1101: what they hold (kind T11)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Side, hold, pad_place
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.contracts.sites import real_rows
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array
from padtrace.recording.value_tensors import ValueKey

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
    """Padded rows write to the reserved page only, the first one; slot 0 where pages are single.

    Negative slots are those that no writer takes.
    """
    place = pad_place(evidence)
    slots, size = _padded_slots(evidence, place.rows)
    seen = present(slots)
    result = _skipped(NEEDS_VALUES, int((~seen).sum()))
    if not seen.any():
        return _skipped(NEEDS_VALUES, max(slots.size, 1))
    hold(
        evidence, result, place.select(seen),
        Side("slots of the reserved page", size[seen]),
        Side("out_cache_loc of a padded row", slots[seen]),
        expected=np.zeros(int(seen.sum()), dtype=np.int64),
        broken=slots[seen] >= size[seen],
        outcome="a padded row writes its KV where a request's may live",
    )  # fmt: skip
    return result


def reserved_slots_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"a padded row of {wording.who(finding)} writes its KV to slot {finding.right.value}, "
        "which is not reserved"
    )


def _padded_slots(evidence: Evidence, pads: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Of each pad the highest slot of a padded row (0 without any), and the page size.

    "Not observed" where the values were not kept, or are of fewer rows than were real.
    """
    slots = np.full(pads.shape, NOT_OBSERVED_CODE, dtype=np.int64)
    sizes = np.ones(pads.shape, dtype=np.int64)
    if not evidence.recording.values:
        return slots, sizes
    processes, entered = (evidence.column("pad", n)[pads] for n in ("process", "enter_seq"))
    workers, real = evidence.column("pad", "worker")[pads], real_rows(evidence, pads)
    for i, (process, seq) in enumerate(zip(processes.tolist(), entered.tolist(), strict=True)):
        kept = evidence.recording.values.get(ValueKey(process, seq, "exit.out_cache_loc"))
        if kept is None or not 0 <= real[i] <= kept.data.shape[0]:
            continue
        slots[i] = max(0, int(kept.data[real[i] :].max(initial=0)))
        for worker, facts in evidence.facts(process).workers.items():
            if evidence.text_id(worker) == workers[i] and facts.page_size:
                sizes[i] = facts.page_size
    return slots, sizes


def lane_values(evidence: Evidence) -> Evaluation:
    """Padded lanes of a graph hold their fill value."""
    return _skipped(NEEDS_LANES, max(evidence.count("pad"), 1))


def _skipped(reason: str, count: int) -> Evaluation:
    result = Evaluation()
    result.skip(reason, count)
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
Padded rows carry slot 0, which no request gets. Another slot is some request's, or will be.
(A writer that does not skip slot 0 puts NaN there, sglang#36207: this rule does not see that.)
The slots are values on the device, which tier `shape` does not hold.
""",
        reserved_slots,
        reserved_slots_sentence,
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
