"""What the benchmarks are built of: the made workload, the tiling, the order of rounds."""

from __future__ import annotations

import numpy as np

from padtrace.explore.case_input import read_case
from padtrace.explore.make import make
from padtrace.recording import schema
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from tests.benchmarks.scripts import measuring, tile, workload


def test_ranks_of_a_server_agree_on_everybodys_counts() -> None:
    layout = workload.Layout(attn_dp=4, attn_tp=2)
    runs = [workload.forwards(layout, rank, 40) for rank in range(layout.attn_dp)]
    for step in zip(*runs, strict=True):
        kinds = {one.kind for one in step}
        counts = {tuple(one.case["raw_counts"]) for one in step}
        assert len(kinds) == len(counts) == 1
        for rank, one in enumerate(step):
            rows = sum(one.case.get("extend_lens", [])) or len(one.case["seq_lens"])
            assert rows == one.case["raw_counts"][rank]


def test_forwards_of_a_run_are_valid_cases_of_every_kind() -> None:
    planned = workload.forwards(workload.Layout(2, 2), 1, 200)
    assert {one.kind for one in planned} == {"draft", "verify", "draft_extend", "prefill"}
    for one in planned:
        read_case(one.case, 0)


def test_tile_repeats_every_event_and_goes_on_counting() -> None:
    planned = workload.forwards(workload.Layout(2, 1), 0, 12)
    once = make([one.case for one in planned if one.kind == "verify"][:3])
    assert once.rows("process") == 1
    assert once.rows("forward") == 3
    thrice = tile.tile(once, 3)
    for kind in schema.EVENT_KINDS:
        before, after = once.table(kind), thrice.table(kind)
        assert after.rows == 3 * before.rows
        if not before.rows:
            continue
        order = after.column("enter_seq")
        assert np.all(np.diff(order) > 0), f"events of kind {kind} are out of order"
        gaps = order.reshape(3, -1) - before.column("enter_seq")
        assert np.all(gaps == gaps[:, :1]), "a repetition is the same events, moved as a whole"
    entered = np.concatenate([thrice.table(k).column("enter_seq") for k in schema.EVENT_KINDS])
    left = np.concatenate([thrice.table(k).column("exit_seq") for k in schema.EVENT_KINDS])
    numbers = np.concatenate([entered, left[left > HIGHEST_ABSENT_CODE]])
    assert len(np.unique(numbers)) == len(numbers), "no two events share a number"
    steps = thrice.table("forward").column("step")
    assert len(np.unique(steps)) == 9


def test_every_variant_begins_rounds_in_turn() -> None:
    seen: list[str] = []
    measuring.interleave(3, ("a", "b", "c"), seen.append)
    assert seen == list("abc" + "bca" + "cab")
