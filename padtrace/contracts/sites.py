"""Forwards as the kernel sees them: how many rows of q, which plan, which pad.

A site is one FlashMLA call, or, where no call was recorded, one padded forward with the rows that
would have reached it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from padtrace.contracts.evidence import NO_ROW, Evidence, present
from padtrace.contracts.model import BoolArray
from padtrace.recording import schema
from padtrace.recording.columns import Int64Array

NO_BOUND = 2**61
# Column of a launch with the enter_seq of the plan whose tensors it was given.
_NAMED_PLAN = "plan_seq"


@dataclass(frozen=True, slots=True)
class Sites:
    """Places where q meets the metadata, as columns of equal length.

    `kind` is the table of `rows` (launch, pad or forward); `q_rows` what reaches the kernel;
    `plans` and `pads` rows of those tables, -1 where none.
    """

    kind: str
    rows: Int64Array
    q_rows: Int64Array
    plans: Int64Array
    pads: Int64Array

    def select(self, mask: BoolArray) -> Sites:
        return Sites(
            self.kind, self.rows[mask], self.q_rows[mask], self.plans[mask], self.pads[mask]
        )


def launch_sites(evidence: Evidence) -> Sites:
    """Every recorded kernel call, with the plan and the pad that came before it."""
    return evidence.once("launch sites", _launch_sites)


def pad_sites(evidence: Evidence) -> Sites:
    """Every padded forward, launched or not."""
    return evidence.once("pad sites", _pad_sites)


def unpadded_sites(evidence: Evidence) -> Sites:
    """Forwards that no pad was recorded for."""
    return evidence.once("unpadded sites", _unpadded_sites)


def _launch_sites(evidence: Evidence) -> Sites:
    rows = np.arange(evidence.count("launch"), dtype=np.int64)
    order = evidence.column("launch", "enter_seq")
    q_rows = evidence.vector_items(evidence.column("launch", "q.shape"), 0)
    plans = plans_of_launches(evidence)
    return Sites("launch", rows, q_rows, plans, _pads_of(evidence, "launch", rows, order))


def _plans_named(evidence: Evidence, launches: Int64Array) -> Int64Array:
    """The plan whose tensors each call was given, where the recording tells it; -1 elsewhere.

    The plan before a call need not be the one it reads: a draft has a backend object per step.
    """
    plans = np.arange(evidence.count("plan"), dtype=np.int64)
    numbers = evidence.column("plan", "enter_seq")
    index = evidence.last_before(
        (
            [*evidence.keys("plan", plans, "process"), numbers],
            np.zeros(plans.shape, dtype=np.int64),
        ),
        (evidence.keys("launch", launches, "process", "plan_seq"), np.ones_like(launches)),
    )
    return np.asarray(index)


def _pad_sites(evidence: Evidence) -> Sites:
    pads = evidence.top_pads
    bound = end_of_pads(evidence, pads)
    plans = evidence.plan_before("pad", pads, bound, evidence.split_plans)
    plans = _named_or(evidence, "pad", pads, plans)
    return Sites("pad", pads, rows_after_pad(evidence, pads), plans, pads)


def _unpadded_sites(evidence: Evidence) -> Sites:
    pads = evidence.top_pads
    rows = np.arange(evidence.count("forward"), dtype=np.int64)
    entered = evidence.column("forward", "enter_seq")
    end = evidence.column("forward", "exit_seq")
    end = np.where(present(end), end, NO_BOUND)
    padded = np.zeros(rows.shape, dtype=np.bool_)
    # A pad that knows its forward is of it; one that does not must lie within its time.
    for names, limit in (
        (("process", "forward"), np.full(rows.shape, NO_BOUND)),
        (("process", "batch"), end),
    ):
        pad_keys = evidence.keys("pad", pads, *names)
        usable = present(pad_keys[1])
        order = evidence.column("pad", "enter_seq")[pads][usable]
        index = evidence.first_after(
            ([key[usable] for key in pad_keys], order),
            (evidence.keys("forward", rows, *names), entered),
        )
        first = order[np.maximum(index, 0)] if order.size else np.full(rows.shape, NO_BOUND)
        padded |= (index >= 0) & (first < limit)
    rows = rows[~padded]
    q_rows = evidence.snapshot("forward", "entry", "input_ids.rows", rows)
    shard = evidence.snapshot("forward", "entry", "attn_cp_metadata.rows", rows)
    q_rows = np.where(present(shard), shard, q_rows)
    plans = evidence.plan_before("forward", rows, end[~padded], evidence.split_plans)
    plans = _named_or(evidence, "forward", rows, plans)
    return Sites("forward", rows, q_rows, plans, np.full(rows.shape, NO_ROW, dtype=np.int64))


def plans_of_launches(evidence: Evidence) -> Int64Array:
    """The plan each kernel call works with, -1 where none is known.

    The one it names, if it names one; otherwise the last plan before it of its batch, which
    another backend object may have made.
    """
    rows = np.arange(evidence.count("launch"), dtype=np.int64)
    order = evidence.column("launch", "enter_seq")
    latest = evidence.plan_before("launch", rows, order, evidence.split_plans)
    # A name that leads to no plan says that the plan was not recorded, not that another was taken.
    return np.where(_names_a_plan(evidence), _named_plans(evidence), latest)


def _names_a_plan(evidence: Evidence) -> BoolArray:
    if not any(column.name == _NAMED_PLAN for column in schema.event_columns("launch")):
        return np.zeros(evidence.count("launch"), dtype=np.bool_)
    return present(evidence.column("launch", _NAMED_PLAN))


def _named_plans(evidence: Evidence) -> Int64Array:
    """Row of the plan that each launch names, -1 where it names none that was recorded."""
    rows = np.arange(evidence.count("launch"), dtype=np.int64)
    if not _names_a_plan(evidence).any():
        return np.full(rows.shape, NO_ROW, dtype=np.int64)
    named = evidence.column("launch", _NAMED_PLAN)
    plans = np.arange(evidence.count("plan"), dtype=np.int64)
    keys = [evidence.column("plan", name) for name in ("process", "enter_seq")]
    return evidence.last_before(
        (keys, np.zeros_like(plans)),
        ([evidence.column("launch", "process"), named], np.ones_like(rows)),
    )


def _named_or(evidence: Evidence, kind: str, rows: Int64Array, plans: Int64Array) -> Int64Array:
    """The plan that a kernel call of each pad's or forward's forward named, else the one given."""
    named = _named_plans(evidence)
    told = np.flatnonzero(named >= 0)
    if not told.size:
        return plans
    of_forward = np.full(evidence.count("forward") + 1, NO_ROW, dtype=np.int64)
    of_forward[forward_of(evidence, "launch", told)] = named[told]
    # A launch outside of any forward wrote to the last place.
    of_forward[-1] = NO_ROW
    forwards = rows if kind == "forward" else forward_of(evidence, kind, rows)
    found = of_forward[forwards]
    return np.where(found >= 0, found, plans)


def with_plans(evidence: Evidence, sites: Sites, plans: Int64Array) -> Sites:
    """The same pads or forwards, each with the last of these plans that it works with."""
    if sites.kind == "pad":
        bound = end_of_pads(evidence, evidence.top_pads)[np.isin(evidence.top_pads, sites.rows)]
    else:
        end = evidence.column("forward", "exit_seq")[sites.rows]
        bound = np.where(present(end), end, NO_BOUND)
    found = evidence.plan_before(sites.kind, sites.rows, bound, plans)
    found = _named_or(evidence, sites.kind, sites.rows, found)
    return Sites(sites.kind, sites.rows, sites.q_rows, found, sites.pads)


def rows_after_pad(evidence: Evidence, pads: Int64Array) -> Int64Array:
    """Rows of q after these pads: the padded input ids, or this context-parallel rank's shard."""
    rows = evidence.snapshot("pad", "exit", "input_ids.rows", pads)
    shard = evidence.snapshot("pad", "exit", "attn_cp_metadata.rows", pads)
    return np.where(present(shard), shard, rows)


def _pads_of(evidence: Evidence, kind: str, rows: Int64Array, order: Int64Array) -> Int64Array:
    pads = evidence.top_pads
    names = ("process", "batch", "forward")
    index = evidence.last_before(
        (evidence.keys("pad", pads, *names), evidence.column("pad", "enter_seq")[pads]),
        (evidence.keys(kind, rows, *names), order),
    )
    if not pads.size:
        return index
    return np.where(index >= 0, pads[np.maximum(index, 0)], NO_ROW)


def end_of_pads(evidence: Evidence, pads: Int64Array) -> Int64Array:
    """Where the stretch of each pad ends: the next unpad or pad of the same batch."""
    order = evidence.column("pad", "enter_seq")[pads]
    names = ("process", "batch")
    origin = (evidence.keys("pad", pads, *names), order)
    unpads = np.arange(evidence.count("unpad"), dtype=np.int64)
    ends = [np.full(pads.shape, NO_BOUND, dtype=np.int64)]
    for kind, rows in (("pad", pads), ("unpad", unpads)):
        numbers = evidence.column(kind, "enter_seq")[rows]
        index = evidence.first_after((evidence.keys(kind, rows, *names), numbers), origin)
        if numbers.size:
            ends.append(np.where(index >= 0, numbers[np.maximum(index, 0)], NO_BOUND))
    return np.asarray(np.min(ends, axis=0))


def forward_of(evidence: Evidence, kind: str, rows: Int64Array) -> Int64Array:
    """Row of the forward that each event happened in, -1 where it was in none."""
    forwards = evidence.count("forward")
    if not forwards:
        return np.full(rows.shape, NO_ROW, dtype=np.int64)
    all_forwards = np.arange(forwards, dtype=np.int64)
    names = ("process", "forward")
    index = evidence.last_before(
        (evidence.keys("forward", all_forwards, *names), np.zeros(forwards, dtype=np.int64)),
        (evidence.keys(kind, rows, *names), np.ones(rows.shape, dtype=np.int64)),
    )
    unknown = ~present(evidence.column(kind, "forward")[rows])
    return np.where(unknown, NO_ROW, index)


def pads_of_forwards(evidence: Evidence) -> Int64Array:
    """Row of the pad of each forward, -1 where there was none."""
    pads = evidence.top_pads
    forwards = forward_of(evidence, "pad", pads)
    found = np.full(evidence.count("forward"), NO_ROW, dtype=np.int64)
    found[forwards[forwards >= 0]] = pads[forwards >= 0]
    return found


def modes_of(evidence: Evidence, sites: Sites) -> Int64Array:
    """Forward mode (string id) at each site: of the plan, else of the pad, else of the forward."""
    modes = evidence.snapshot("plan", "entry", "forward_mode", sites.plans)
    if sites.kind == "forward":
        other = evidence.column("forward", "forward_mode")[sites.rows]
        entry = evidence.snapshot("forward", "entry", "forward_mode", sites.rows)
        other = np.where(present(other), other, entry)
    else:
        other = evidence.snapshot("pad", "entry", "forward_mode", sites.pads)
    modes = np.where(present(modes), modes, other)
    forwards = forward_of(evidence, sites.kind, sites.rows)
    fallback = evidence.at("forward", "forward_mode", forwards)
    return np.where(present(modes), modes, fallback)


def real_rows(evidence: Evidence, pads: Int64Array) -> Int64Array:
    """Token rows that belong to requests when these pads are met.

    Not simply those of input_ids: on the second step of a draft it may still be padded.
    """
    mode = evidence.snapshot("pad", "entry", "forward_mode", pads)
    tokens = evidence.snapshot("pad", "entry", "input_ids.rows", pads)
    requests = evidence.snapshot("pad", "entry", "batch_size", pads)
    width = evidence.snapshot("pad", "entry", "spec_info.num_tokens_per_req", pads)
    single = evidence.is_text(mode, "DECODE", "IDLE") & present(requests)
    branches = np.where(single, requests, 0) * branches_of(evidence, "pad", pads)
    wide = evidence.is_text(mode, "TARGET_VERIFY", "DRAFT_EXTEND_V2")
    wide &= present(requests) & present(width)
    scaled = np.where(wide, requests, 0) * np.where(wide, width, 0)
    return np.where(single, branches, np.where(wide, scaled, tokens))


def branches_of(evidence: Evidence, kind: str, rows: Int64Array) -> Int64Array:
    """Rows of each request in a decode at these events: the top-k of a draft worker, else 1."""
    processes = evidence.at(kind, "process", rows)
    workers = evidence.at(kind, "worker", rows)
    branches = np.ones(rows.shape, dtype=np.int64)
    for process in range(evidence.count("process")):
        facts = evidence.facts(process).workers.get("draft")
        if facts is not None and facts.topk is not None and facts.topk > 1:
            own = (processes == process) & (workers == evidence.text_id("draft"))
            branches[own] = facts.topk
    return branches


PLANNED = {1: "before the pad", 0: "after the pad"}


def planned_before(evidence: Evidence, plans: Int64Array, pads: Int64Array) -> Int64Array:
    """1 where the plan was made before the pad of its forward, 0 after it, -1 unknown."""
    known = (plans >= 0) & (pads >= 0)
    earlier = evidence.at("plan", "enter_seq", plans) < evidence.at("pad", "enter_seq", pads)
    return np.where(known, earlier.astype(np.int64), -1)
