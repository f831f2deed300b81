"""PT1001 and PT1002: what padded rows do (kind T10), and PT1101: what they hold (kind T11)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Side, hold, pad_place
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import BoolArray, Contract, Evaluation, Finding, Severity
from padtrace.contracts.sites import real_rows
from padtrace.recording.absent import NOT_OBSERVED_CODE, Absent
from padtrace.recording.columns import Int64Array
from padtrace.recording.value_tensors import ValueKey

NEEDS_VALUES = "needs the values of out_cache_loc; record with --tier meta"
MADE_UP = "an idle rank was given a request beside a prefill, whose rows may count as real"
NOT_PADDED = "no prefill was padded to the longest rank"
PREFILL_MODES = ("EXTEND", "MIXED")
NEEDS_LANES = "needs the values of padded graph lanes; record with --tier meta"


def routing_bound(evidence: Evidence) -> Evaluation:
    """num_token_non_padded_cpu is the number of rows before the pad."""
    result = Evaluation()
    place = pad_place(evidence)
    before = real_rows(evidence, place.rows)
    bound = evidence.snapshot("pad", "exit", "num_token_non_padded_cpu", place.rows)
    # Under context parallelism and sequence sharding the bound is of this rank's shard.
    sharded = evidence.snapshot("pad", "exit", "attn_cp_metadata.rows", place.rows) >= 0
    made_up = _made_up(evidence, place.rows)
    result.skip(MADE_UP, int(made_up.sum()))
    hold(
        evidence, result, place,
        Side("rows before the pad", np.where(sharded | made_up, NOT_OBSERVED_CODE, before)),
        Side("num_token_non_padded_cpu", bound),
        outcome="expert routing masks real rows, or lets padded ones take part",
    )  # fmt: skip
    return result


def _made_up(evidence: Evidence, pads: Int64Array) -> BoolArray:
    """Pads that gave an idle rank one request over all its rows, beside a prefill.

    0.5.16 to 0.5.20 count these rows as real on purpose, so that experts do not starve; later
    releases count none.
    """
    before = evidence.snapshot("pad", "entry", "batch_size", pads)
    after = evidence.snapshot("pad", "exit", "forward_mode", pads)
    return np.asarray((before == 0) & evidence.is_text(after, "EXTEND"))


def masked_prefill(evidence: Evidence) -> Evaluation:
    """The rows a prefill was padded by are masked from expert routing."""
    result = Evaluation()
    place = pad_place(evidence)
    assert place.modes is not None
    before = real_rows(evidence, place.rows)
    padded = evidence.snapshot("pad", "exit", "input_ids.rows", place.rows)
    bound = evidence.snapshot("pad", "exit", "num_token_non_padded_cpu", place.rows)
    longest = evidence.is_text(
        evidence.snapshot("pad", "exit", "dp_padding_mode", place.rows), "MAX_LEN"
    )
    prefill = evidence.is_text(place.modes, *PREFILL_MODES) & longest & present(before)
    prefill &= padded > before
    sharded = evidence.snapshot("pad", "exit", "attn_cp_metadata.rows", place.rows) >= 0
    prefill &= ~sharded & (bound != NOT_OBSERVED_CODE)
    if not prefill.any():
        result.skip(NOT_PADDED, max(place.rows.size, 1))
        return result
    chosen = place.select(prefill)
    before, padded, bound = before[prefill], padded[prefill], bound[prefill]
    # No mask lets every row take part.
    routed = np.where(present(bound), np.minimum(bound, padded), padded)
    hold(
        evidence, result, chosen, Side("rows before the pad", before), Side("rows routed", routed),
        broken=routed >= padded,
        outcome="padded rows take expert capacity and part in every all-to-all",
    )  # fmt: skip
    for index in np.flatnonzero(routed < padded)[:1]:
        same = int((routed < padded).sum())
        more = f" ({same:,} such pads)" if same > 1 else ""
        result.notes.append(
            f"{padded[index] - before[index]} of {padded[index]} rows of a padded prefill belong "
            f"to nobody, and the routing mask covers them: num_token_non_padded_cpu is "
            f"{bound[index]}{more}"
        )
    return result


def masked_prefill_sentence(evidence: Evidence, finding: Finding) -> str:
    entry = evidence.recording.event("pad", finding.row).snapshot("exit") or {}
    bound = entry.get("num_token_non_padded_cpu")
    told = f"num_token_non_padded_cpu is {bound}"
    if isinstance(bound, Absent):
        told = "this release keeps no count of real rows"
    real, routed = finding.left.value or 0, finding.right.value or 0
    return (
        f"{routed - real} of {routed} rows of {wording.who(finding)} belong to nobody, and a "
        f"router takes them for real: {told}"
    )


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
        "num_token_non_padded_cpu is the number of rows before the pad",
        Severity.SILENT,
        """
Expert routing masks rows from this number on. Too small, and real tokens are dropped; too large,
and padding takes part (sglang#28378: a score fell from 0.94 to 0.1). `ForwardBatch.init_new` takes
it from the real rows, and the pad leaves it; only an idle rank beside a prefill has it set anew.
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
        "PT1003",
        "padded prefill is masked",
        ("T10",),
        "the rows that a prefill was padded by are masked from expert routing",
        Severity.SUSPECT,
        """
Under MAX_LEN a short prefill is padded to the longest rank: 5 rows become 12, and 7 belong to
nobody. Where num_token_non_padded_cpu counts the 5, `mask_topk_ids` sets the experts of the others
to -1, and this is one line and no finding. Where it is None, counts all 12, or the release has no
such count, the router takes padding for tokens.
""",
        masked_prefill,
        masked_prefill_sentence,
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
