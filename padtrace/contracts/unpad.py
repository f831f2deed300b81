"""PT601 to PT603: what comes back after the forward (kind T6)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, rows_of
from padtrace.contracts.evidence import NO_ROW, Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.contracts.sites import real_rows
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array

RESTORED = (
    "batch_size",
    "out_cache_loc.rows",
    "input_ids.rows",
    "positions.rows",
    "req_pool_indices.rows",
    "seq_lens.rows",
    "seq_lens_cpu.rows",
    "orig_seq_lens.rows",
    "extend_num_tokens",
    "extend_seq_lens.rows",
    "extend_prefix_lens.rows",
    "lora_ids.rows",
    "mrope_positions.rows",
    "spec_info.topk_p.rows",
    "spec_info.topk_index.rows",
    "spec_info.hidden_states.rows",
    "spec_info.num_correct_drafts.rows",
    "spec_info.num_accept_tokens.rows",
)


def restored(evidence: Evidence) -> Evaluation:
    """The unpad gives every field back the length it had before the pad."""
    result = Evaluation()
    place = _unpads(evidence)
    for name in RESTORED:
        before = evidence.snapshot("pad", "entry", name, _pads(place))
        after = evidence.snapshot("unpad", "exit", name, place.rows)
        hold(
            evidence, result, place,
            Side(f"{name} before the pad", before), Side(f"{name} after the unpad", after),
            from_none=evidence.is_none(before) & present(after),
            outcome="whoever reads the batch after the forward sees padding as requests or tokens",
        )  # fmt: skip
    before = evidence.snapshot("pad", "entry", "forward_mode", _pads(place))
    after = evidence.snapshot("unpad", "exit", "forward_mode", place.rows)
    hold(
        evidence, result, place,
        Side("forward_mode before the pad", before), Side("forward_mode after the unpad", after),
        texts=evidence.recording.strings,
        outcome="the batch keeps the mode it was relabelled to",
    )  # fmt: skip
    return result


def restored_sentence(evidence: Evidence, finding: Finding) -> str:
    name = finding.left.name.removesuffix(" before the pad")
    left, right = finding.left.value, finding.right.value
    if name == "forward_mode":
        before, after = finding.left.text, finding.right.text
        return f"forward_mode is {after} after the unpad and was {before} before the pad"
    field = name.removesuffix(".rows")
    if left is None:
        what = f"{right} rows" if name.endswith(".rows") else f"{right}"
        return (
            f"{field} is {what} after the unpad of {wording.who(finding)} and was None before the "
            "pad: it is not taken back"
        )
    return (
        f"{field} has {right} rows after the unpad of {wording.who(finding)} and had {left} "
        "before the pad: it is not restored"
    )


def logits(evidence: Evidence) -> Evaluation:
    """The logits come back with as many rows as went in before the pad."""
    result = Evaluation()
    place = _unpads(evidence)
    pads = _pads(place)
    given = evidence.column("unpad", "logits_before.rows")[place.rows]
    for name in ("input_ids.rows", "batch_size"):
        padded = evidence.snapshot("pad", "exit", name, pads)
        raw = evidence.snapshot("pad", "entry", name, pads)
        if name == "input_ids.rows":
            raw = real_rows(evidence, pads)
        # A row per token or a row per request: told by what the unpad was given.
        fits = given == padded
        if name == "batch_size":
            fits &= given != evidence.snapshot("pad", "exit", "input_ids.rows", pads)
        left = np.where(fits, raw, NOT_OBSERVED_CODE)
        for field in ("logits", "hidden_states"):
            before = evidence.column("unpad", f"{field}_before.rows")[place.rows]
            after = evidence.column("unpad", f"{field}_after.rows")[place.rows]
            same = before == given
            hold(
                evidence, result, place,
                Side(f"{name} before the pad", np.where(same, left, NOT_OBSERVED_CODE)),
                Side(f"{field}_after.rows", after),
                outcome="results of padding rows are handed out, or real ones are cut off",
            )  # fmt: skip
    return result


def logits_sentence(evidence: Evidence, finding: Finding) -> str:
    field = finding.right.name.removesuffix("_after.rows")
    return (
        f"{field} has {finding.right.value} rows after the unpad of {wording.who(finding)}, needs "
        f"{finding.right.expected}"
    )


def sums(evidence: Evidence) -> Evaluation:
    """The pad adds to seq_lens_sum what it adds to the lengths; after the unpad it is their sum."""
    result = Evaluation()
    pads = evidence.top_pads
    modes = evidence.snapshot("pad", "entry", "forward_mode", pads)
    unpads = _unpads(evidence)
    for kind, place, when in (
        ("pad", Place("pad", pads, modes, None, pads), "after the pad"),
        ("unpad", unpads, "after the unpad"),
    ):
        total = evidence.snapshot(kind, "exit", "seq_lens_cpu.sum", place.rows)
        carried = evidence.snapshot(kind, "exit", "seq_lens_sum", place.rows)
        if kind == "pad":
            total = _plus_error_at_entry(evidence, place.rows, total)
        hold(
            evidence, result, place,
            Side(f"sum of seq_lens_cpu {when}", total), Side(f"seq_lens_sum {when}", carried),
            outcome="a kernel or a buffer is sized by a sum that is not the sum",
        )  # fmt: skip
    return result


def _plus_error_at_entry(evidence: Evidence, pads: Int64Array, total: Int64Array) -> Int64Array:
    """The sum with what it was off by already: an earlier unpad of the same batch left that."""
    true = evidence.snapshot("pad", "entry", "seq_lens_cpu.sum", pads)
    carried = evidence.snapshot("pad", "entry", "seq_lens_sum", pads)
    known = present(true) & present(carried) & present(total)
    off = np.where(known, carried, 0) - np.where(known, true, 0)
    return np.where(known, total + off, total)


def sums_sentence(evidence: Evidence, finding: Finding) -> str:
    when = finding.right.name.removeprefix("seq_lens_sum ")
    return (
        f"seq_lens_sum is {finding.right.value} {when} of {wording.who(finding)}, the lengths add "
        f"up to {finding.left.value}"
    )


def _unpads(evidence: Evidence) -> Place:
    """Every unpad with the pad it takes back."""
    rows = rows_of(evidence, "unpad")
    pads = evidence.top_pads
    names = ("process", "batch")
    index = evidence.last_before(
        (evidence.keys("pad", pads, *names), evidence.column("pad", "enter_seq")[pads]),
        (evidence.keys("unpad", rows, *names), evidence.column("unpad", "enter_seq")),
    )
    found = np.where(index >= 0, pads[np.maximum(index, 0)], NO_ROW) if pads.size else index
    # An unpad that raised left nothing to compare.
    finished = present(evidence.column("unpad", "exit")) & (found >= 0)
    rows, found = rows[finished], found[finished]
    modes = evidence.snapshot("pad", "entry", "forward_mode", found)
    return Place("unpad", rows, modes, None, found)


def _pads(place: Place) -> Int64Array:
    assert place.pads is not None
    return place.pads


CONTRACTS = (
    Contract(
        "PT601",
        "fields restored",
        ("T6",),
        "after the unpad every field is as long as it was before the pad",
        Severity.SILENT,
        """
`post_forward_mlp_sync_batch` takes the pad back, but not from every field. out_cache_loc is kept
aside only after it was padded, so restoring it changes nothing, in all releases looked at.
input_ids, lora_ids and the counts stay padded too. A field that was None before the pad must be
None again. Which fields stay padded without harm, by mode and release, is declared in
`tolerances.json`; another one is a finding.
""",
        restored,
        restored_sentence,
    ),
    Contract(
        "PT602",
        "rows of the results",
        ("T6", "T12"),
        "logits and hidden states come back with the rows that went in before the pad",
        Severity.SILENT,
        """
Results of padding rows must not be handed out, those of real rows not cut off. The unpad multiplies
the batch size by a width; a wrong width cuts at the wrong place.
""",
        logits,
        logits_sentence,
    ),
    Contract(
        "PT603",
        "sum of the lengths",
        ("T6", "T3"),
        "seq_lens_sum is the sum of seq_lens",
        Severity.SILENT,
        """
Backends size index buffers by seq_lens_sum. After the unpad it still counts the padding: 305 where
the three lengths left add up to 300.
""",
        sums,
        sums_sentence,
    ),
)
