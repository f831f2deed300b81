"""PT801 to PT804: plans and lists that outlive the batch they were made for (kind T8)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, pad_place
from padtrace.contracts.evidence import NO_ROW, Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.contracts.sites import end_of_pads
from padtrace.recording.absent import NOT_OBSERVED_CODE

ONE_STEP = "no draft of several steps was padded"
LATER_COUNTS = "tokens of the group in a later draft step"
OWNED = ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu")


def marked_rows(evidence: Evidence) -> Evaluation:
    """A plan marked ready was made for the rows that arrive, unless it knows better."""
    result = Evaluation()
    place = pad_place(evidence)
    ready = np.arange(evidence.count("ready"), dtype=np.int64)
    names = ("process", "batch")
    order = evidence.column("pad", "enter_seq")[place.rows]
    index = evidence.last_before(
        (evidence.keys("ready", ready, *names), evidence.column("ready", "enter_seq")),
        (evidence.keys("pad", place.rows, *names), order),
    )
    # Also one made after the pad: 0.5.12 plans again whatever the flag says.
    end = end_of_pads(evidence, place.rows)
    plans = evidence.plan_before("pad", place.rows, end, evidence.split_plans)
    marked = evidence.at("ready", "planned_num_tokens", index)
    again = evidence.at("ready", "replan_equivalent", index) == 1
    # A plan with num_splits counted the padded rows by itself; PT101 judges it.
    open_plans = (plans < 0) & ~again
    rows = evidence.snapshot("pad", "exit", "input_ids.rows", place.rows)
    hold(
        evidence, result, place,
        Side("q.rows", rows),
        Side("planned_num_tokens", np.where(open_plans, marked, NOT_OBSERVED_CODE)),
        outcome="the backend works with metadata of fewer rows than q has",
    )  # fmt: skip
    return result


def marked_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"planned for {finding.right.value} rows, q has {finding.left.value}: the metadata of "
        f"{wording.who(finding)} were marked ready before the pad and are not made again"
    )


def alike_steps(evidence: Evidence) -> Evaluation:
    """Every step of a multi-step draft is planned for the same rows."""
    result = Evaluation()
    plans = evidence.split_plans
    steps = evidence.column("plan", "draft_step")[plans]
    later = plans[present(steps) & (steps > 0)]
    first = plans[steps == 0]
    names = ("process", "batch", "worker")
    index = evidence.last_before(
        (evidence.keys("plan", first, *names), evidence.column("plan", "enter_seq")[first]),
        (evidence.keys("plan", later, *names), evidence.column("plan", "enter_seq")[later]),
    )
    before = np.where(index >= 0, first[np.maximum(index, 0)], NO_ROW) if first.size else index
    modes = evidence.snapshot("plan", "entry", "forward_mode", later)
    hold(
        evidence, result, Place("plan", later, modes, later),
        Side("num_splits.rows of the first step", evidence.at("plan", "num_splits.rows", before)),
        Side("num_splits.rows", evidence.column("plan", "num_splits.rows")[later]),
        outcome="the later step fits and hides what was wrong with the first",
    )  # fmt: skip
    return result


def alike_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"draft step {finding.draft_step} was planned with num_splits {finding.right.value}, the "
        f"first step with {finding.left.value}: counts padded in the first step were left in the "
        "batch"
    )


def own_lists(evidence: Evidence) -> Evaluation:
    """The pad leaves lists alone that the batch was given by others."""
    result = Evaluation()
    place = pad_place(evidence)
    for name in OWNED:
        before = evidence.snapshot("pad", "entry", name, place.rows)
        before = evidence.vector_lengths(before)
        after = evidence.column("pad", f"owner.{name}.rows")[place.rows]
        hold(
            evidence, result, place,
            Side(f"{name} as given", before), Side(f"owner.{name}.rows", after),
            outcome="the list belongs to the caller, and to a plan made before: both change",
        )  # fmt: skip
    before = evidence.snapshot("pad", "entry", "lora_ids.rows", place.rows)
    after = evidence.column("pad", "owner.lora_ids.rows")[place.rows]
    hold(
        evidence, result, place,
        Side("lora_ids as given", before), Side("owner.lora_ids.rows", after),
        outcome="the list belongs to the scheduler's batch",
    )  # fmt: skip
    return result


def own_sentence(evidence: Evidence, finding: Finding) -> str:
    name = finding.left.name.removesuffix(" as given")
    return (
        f"the pad of {wording.who(finding)} edited a list of others: {name} went in with "
        f"{finding.left.value} and its owner now has {finding.right.value} entries, plans made "
        "with it included"
    )


def left_over(evidence: Evidence) -> Evaluation:
    """A later step of a draft starts from the counts the first one started from."""
    result = Evaluation()
    place = pad_place(evidence)
    steps = evidence.column("pad", "draft_step")[place.rows]
    later = place.select(present(steps) & (steps > 0))
    first = place.rows[steps == 0]
    if not later.rows.size:
        result.skip(ONE_STEP, max(place.rows.size, 1))
        return result
    names = ("process", "batch", "worker")
    order = evidence.column("pad", "enter_seq")
    index = evidence.last_before(
        (evidence.keys("pad", first, *names), order[first]),
        (evidence.keys("pad", later.rows, *names), order[later.rows]),
    )
    before = np.where(index >= 0, first[np.maximum(index, 0)], NO_ROW) if first.size else index
    name = "global_num_tokens_cpu"
    raw = evidence.snapshot("pad", "entry", name, before)
    padded = evidence.snapshot("pad", "exit", name, before)
    met = evidence.snapshot("pad", "entry", name, later.rows)
    # A plan of this very step, made between the first pad and its own.
    plans, planned = evidence.split_plans, evidence.column("plan", "enter_seq")
    own = evidence.last_before(
        (evidence.keys("plan", plans, *names, "draft_step"), planned[plans]),
        (evidence.keys("pad", later.rows, *names, "draft_step"), order[later.rows]),
    )
    plans = np.where(own >= 0, plans[np.maximum(own, 0)], NO_ROW) if plans.size else own
    again = evidence.at("plan", "enter_seq", plans) > evidence.at("pad", "enter_seq", before)
    hold(
        evidence, result, later,
        Side("tokens of the group in the first step", evidence.vector_sums(raw)),
        Side(LATER_COUNTS, evidence.vector_sums(met)),
        broken=(met == padded) & (met != raw),
        harmless=~((plans >= 0) & again),
        outcome="the step is planned on counts that are padded already, and hides the first one",
    )  # fmt: skip
    return result


def left_over_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"draft step {finding.draft_step} starts from {finding.right.value} tokens in the group, "
        f"the first step from {finding.left.value}: padded counts were left in the batch"
    )


CONTRACTS = (
    Contract(
        "PT801",
        "marked plan fits",
        ("T8",),
        "a plan that was marked ready was made for the rows that arrive",
        Severity.SUSPECT,
        """
`mark_forward_metadata_ready` (before 0.5.15 a skip flag) says that the forward need not plan again.
If the pad changes the rows afterwards, only a plan that allows a re-plan, or a backend that ignores
extra rows, can cope (sglang#38580). For plans with num_splits PT101 judges the rows themselves.
""",
        marked_rows,
        marked_sentence,
    ),
    Contract(
        "PT802",
        "draft steps alike",
        ("T8",),
        "every step of a multi-step draft is planned for the same rows",
        Severity.SILENT,
        """
The pad writes aligned counts into the batch and the unpad does not take them back. A second draft
step on the same batch is then planned on padded counts and fits, while the first one did not: who
looks at the last step only sees nothing wrong.
""",
        alike_steps,
        alike_sentence,
    ),
    Contract(
        "PT804",
        "counts taken back between steps",
        ("T8",),
        "a later step of a draft starts from the same per-rank counts as the first",
        Severity.SUSPECT,
        """
The pad writes padded counts into the batch and the unpad leaves them there, in all releases looked
at. Padding padded counts changes nothing, so this is harmless where all steps were planned before
the first pad, as the multi-step backends do. A step planned afterwards is planned for padding.
""",
        left_over,
        left_over_sentence,
    ),
    Contract(
        "PT803",
        "others' lists untouched",
        ("T8", "T4"),
        "the pad does not edit lists that the batch was given",
        Severity.SILENT,
        """
Release 0.5.20 extends extend_seq_lens_cpu, extend_prefix_lens_cpu and
extend_logprob_start_lens_cpu in place. The caller's lists grow with them, and so does the list
inside a plan that was made before, whose tensors keep the old number of requests.
""",
        own_lists,
        own_sentence,
    ),
)
