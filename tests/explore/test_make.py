"""What a configuration becomes, against arithmetic on paper and the order of the eager path."""

from __future__ import annotations

from typing import Any

import pytest

from padtrace.contracts.engine import check
from padtrace.errors import UsageError
from padtrace.explore.make import make
from padtrace.recording.absent import Absent
from padtrace.recording.model import Event, Recording
from padtrace.recording.reader import from_bytes
from padtrace.recording.writer import to_bytes
from padtrace.replay import releases, service

VERIFY = {"forward_mode": "TARGET_VERIFY", "spec": "verify", "width": 6, "bs": [3], "attn_tp": 4}
DRAFT_EXTEND = {
    "forward_mode": "DRAFT_EXTEND_V2", "spec": "draft_extend", "width": 6, "bs": [3], "attn_tp": 4,
}  # fmt: skip
DRAFT = {"forward_mode": "DECODE", "spec": "draft", "bs": [3], "attn_tp": 4}
DECODE = {"forward_mode": "DECODE", "bs": [3, 9], "attn_tp": 2, "attn_dp": 2, "dp_rank": 1}
EXTEND = {
    "forward_mode": "EXTEND", "bs": [2], "extend_lens": [5, 4], "prefix_lens": [0, 16],
    "raw_counts": [9],
}  # fmt: skip
IDLE = {"forward_mode": "IDLE", "bs": [4, 0], "attn_dp": 2, "dp_rank": 1}


def _kinds(recording: Recording) -> list[str]:
    return [event.kind for event in recording.events()]


def _one(recording: Recording, kind: str) -> Event:
    found = [event for event in recording.events() if event.kind == kind]
    assert len(found) == 1
    return found[0]


def _snapshot(case: dict[str, Any]) -> dict[str, Any]:
    snapshot = _one(make(case), "batch").snapshot("exit")
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize(
    ("case", "tokens", "requests", "total"),
    [
        (VERIFY, 18, 3, 300),
        (DRAFT_EXTEND, 18, 3, 300),
        (DRAFT, 3, 3, 300),
        (DECODE, 9, 9, 900),
        (EXTEND, 9, 2, 25),
        (IDLE, 0, 0, 0),
    ],
)
def test_rows_before_any_padding(
    case: dict[str, Any], tokens: int, requests: int, total: int
) -> None:
    snapshot = _snapshot(case)
    assert [snapshot[f"{name}.rows"] for name in ("input_ids", "positions", "out_cache_loc")] == [
        tokens
    ] * 3
    assert snapshot["batch_size"] == snapshot["seq_lens.rows"] == requests
    assert snapshot["seq_lens_sum"] == snapshot["seq_lens_cpu.sum"] == total


def test_extend_lengths_add_up() -> None:
    snapshot = _snapshot(EXTEND)
    assert snapshot["extend_seq_lens_cpu"] == [5, 4]
    assert snapshot["extend_prefix_lens_cpu"] == [0, 16]
    assert snapshot["seq_lens_cpu.max"] == 20
    draft = _snapshot(DRAFT_EXTEND)
    assert draft["extend_seq_lens_cpu"] == [6, 6, 6]
    assert draft["extend_prefix_lens_cpu"] == [94, 94, 94]


def test_hidden_states_that_are_none_stay_apart_from_unobserved() -> None:
    case = {**DRAFT_EXTEND, "hidden_states": None, "logits_hidden": None}
    recording = make(case)
    snapshot = _one(recording, "batch").snapshot("exit")
    assert snapshot is not None
    assert snapshot["spec_info.hidden_states.rows"] is None
    assert _one(recording, "unpad")["hidden_states_before.rows"] is None
    assert _one(make(DRAFT_EXTEND), "unpad")["hidden_states_before.rows"] is Absent.NOT_OBSERVED


BEFORE = ["batch", "sync", "plan", "ready", "forward", "pad", "launch", "unpad"]
AFTER = ["batch", "sync", "forward", "pad", "plan", "launch", "unpad"]


@pytest.mark.parametrize(
    ("case", "plan", "order"),
    [
        (DRAFT_EXTEND, "auto", BEFORE),
        (DRAFT, "auto", BEFORE),
        (VERIFY, "auto", AFTER),
        (DECODE, "auto", AFTER),
        (EXTEND, "auto", AFTER),
        (IDLE, "auto", AFTER),
        (VERIFY, "before", BEFORE),
        (DRAFT_EXTEND, "after", AFTER),
    ],
)
def test_the_order_of_the_eager_path(case: dict[str, Any], plan: Any, order: list[str]) -> None:
    assert _kinds(make(case, plan)) == order


def test_results_are_not_observed() -> None:
    recording = make(VERIFY)
    assert _one(recording, "sync")["counts_before"] == [3]
    assert _one(recording, "sync")["counts_after"] is Absent.NOT_OBSERVED
    assert _one(recording, "pad")["exit"] is Absent.NOT_OBSERVED
    assert _one(recording, "plan")["num_splits.rows"] is Absent.NOT_OBSERVED
    assert _one(recording, "launch")["q.shape"] is Absent.NOT_OBSERVED


def test_events_nest_and_are_numbered_without_gaps() -> None:
    events = list(make(DRAFT_EXTEND).events())
    numbers = [event.integer("enter_seq") for event in events]
    ends = [event.integer("exit_seq") for event in events]
    assert sorted(number for number in numbers + ends if number is not None) == list(
        range(2 * len(events))
    )
    forward = next(event for event in events if event.kind == "forward")
    inside = [event.kind for event in events if event["parent"] == forward["enter_seq"]]
    assert inside == ["pad", "launch", "unpad"]


def test_a_second_step_runs_on_the_same_batch() -> None:
    events = list(make({**DRAFT, "steps": 2}).events())
    assert [event.kind for event in events].count("batch") == 1
    assert [event["draft_step"] for event in events if event.kind == "pad"] == [0, 1]


def test_graph_runners_are_asked_twice_each() -> None:
    case = {**VERIFY, "graph": {"algo": "EAGLE", "runners": ["decode"]}}
    asked = [event for event in make(case).events() if event.kind == "graph"]
    assert [event["function"] for event in asked] == ["can_run_graph", "load_batch"]
    assert asked[0]["num_tokens_per_bs"] == 6


def test_one_process_per_topology() -> None:
    other = {**VERIFY, "attn_tp": 8}
    recording = make([VERIFY, DRAFT_EXTEND, other])
    assert recording.rows("process") == 2
    assert recording.process(1)["attn_tp_size"] == 8
    batches = recording.table("batch").column("batch").tolist()
    assert sorted(batches) == [0, 0, 1]
    named = make({"cases": [{"id": "one", "input": VERIFY}], "meta": {}})
    assert named.facts[0]["case"]["cases"] == [{"id": "one", "batch": 0}]


def test_the_switch_of_cp_v2_is_a_fact() -> None:
    assert make({**VERIFY, "cp_v2": True}).facts[0]["environment"] == {"SGLANG_ENABLE_CP_V2": "1"}
    assert make(VERIFY).facts[0]["environment"] == {}


def test_it_is_a_recording_like_any_other() -> None:
    recording = make([VERIFY, EXTEND, IDLE])
    again = from_bytes(to_bytes(recording), "memory")
    assert [event.values for event in again.events()] == [
        event.values for event in recording.events()
    ]


def test_a_draft_of_branches_has_a_row_for_each() -> None:
    # Eight requests of top-k 4, as EagleDraftInput counts them: num_tokens_per_req is the top-k.
    recording = make({**DRAFT, "bs": [8], "topk": 4})
    snapshot = _one(recording, "batch").snapshot("exit")
    assert snapshot is not None
    # The inputs of the first step are one per request yet.
    names = ("positions.rows", "input_ids.rows", "batch_size")
    assert [snapshot[name] for name in names] == [32, 8, 8]
    assert snapshot["spec_info.num_tokens_per_req"] == 4
    assert snapshot["spec_info.num_tokens_for_logprob_per_req"] == 4
    assert snapshot["spec_info.topk_p.rows"] == 8
    assert recording.facts[0]["workers"]["draft"]["topk"] == 4


def test_what_is_not_synchronised_is_not_padded() -> None:
    recording = make({**DRAFT_EXTEND, "mlp_sync": False})
    assert {"sync", "pad", "unpad"}.isdisjoint(_kinds(recording))
    assert {"batch", "plan", "launch", "forward"} <= set(_kinds(recording))
    assert {event["step_source"] for event in recording.events()} == {"round"}
    synced = {"sync", "pad", "unpad"} & set(_kinds(make({**DRAFT_EXTEND, "mlp_sync": True})))
    assert synced == {"sync", "pad", "unpad"} & set(_kinds(make(DRAFT_EXTEND)))


@pytest.mark.parametrize(
    ("device", "facts"),
    [
        ("sm90", {"type": "cuda", "capability": [9, 0]}),
        ("sm100", {"type": "cuda", "capability": [10, 0]}),
        ("cpu", {"type": "cpu"}),
        ("hip", {"type": "hip"}),
    ],
)
def test_the_device_is_a_fact(device: str, facts: dict[str, Any]) -> None:
    made = make({**VERIFY, "device": device}).facts[0]
    assert (made["device"], made["case"]["device"]) == (facts, device)
    assert make(VERIFY).facts[0]["case"]["device"] == "cpu"


def test_cases_are_steps_of_their_own_unless_they_are_said_to_be_ranks_of_one() -> None:
    def steps(cases: Any) -> list[int]:
        made = make(cases)
        batches = [event for event in made.events() if event.kind == "batch"]
        ordered = sorted(batches, key=lambda event: str(event["step"]))
        return sorted(step for event in ordered if isinstance(step := event["step"], int))

    assert steps([VERIFY, EXTEND, VERIFY, IDLE]) == [1, 2, 3, 4]
    ranks = [{"step": 2, "input": DECODE}, {"step": 2, "input": {**DECODE, "dp_rank": 0}}]
    assert steps([*ranks, VERIFY, EXTEND]) == [1, 2, 2, 3]


@pytest.mark.release
def test_many_cases_of_one_recording_are_not_taken_for_ranks_of_one_step() -> None:
    """Two configurations of the same counts, on two DP ranks, that pad to other buffers."""
    if releases.here("0.5.18") is None:
        pytest.skip("SGLang 0.5.18 is not here: padtrace releases fetch 0.5.18")
    shared = {"bs": [3, 1], "attn_dp": 2, "attn_tp": 2, "raw_counts": [3, 1]}
    decode = {**shared, "forward_mode": "DECODE", "dp_rank": 0}
    verify = {**shared, "forward_mode": "TARGET_VERIFY", "spec": "verify", "width": 4, "dp_rank": 1}
    for cases, compared in (
        ([decode, verify], 0),
        ([{"step": 1, "input": decode}, {"step": 1, "input": {**decode, "dp_rank": 1}}], 1),
    ):
        replayed = service.replay(make(cases), sglang="0.5.18", kernels="off")
        report = check(replayed, {"PT402"})
        assert (report.findings, report.evaluated["PT402"]) == ([], compared)
    service.close()


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ({**VERIFY, "topk": 4, "spec": None, "forward_mode": "DECODE"}, "'topk'"),
        ({**DRAFT, "topk": 0}, "'topk'"),
        ({**DRAFT, "topk": 4, "width": 6}, "'topk'"),
        ({**VERIFY, "mlp_sync": "no"}, "'mlp_sync'"),
        ({**DECODE, "mlp_sync": False}, "'mlp_sync'"),
        ({**VERIFY, "device": "sm80"}, "'device'"),
        ({"step": 0, "input": VERIFY}, "'step'"),
        ({"step": "one", "input": VERIFY}, "'step'"),
        ({**VERIFY, "forward_mode": "PREFILL"}, "'forward_mode'"),
        ({"spec": "verify", "bs": [1]}, "'forward_mode'"),
        ({**VERIFY, "spec": "draft"}, "'spec'"),
        ({**VERIFY, "width": 0}, "'width'"),
        ({**VERIFY, "width": True}, "'width'"),
        ({**VERIFY, "width": 6.0}, "'width'"),
        ({**VERIFY, "bs": 3}, "'bs'"),
        ({**VERIFY, "bs": [0]}, "'bs'"),
        ({**VERIFY, "bs": [10**9]}, "'bs'"),
        ({**VERIFY, "bs": [60_000], "width": 1024}, "token rows"),
        ({**VERIFY, "attn_dp": 3, "bs": [1, 2]}, "'bs'"),
        ({**DECODE, "dp_rank": 2}, "'dp_rank'"),
        ({**DECODE, "raw_counts": [1, 2, 3]}, "'raw_counts'"),
        ({**EXTEND, "extend_lens": [5]}, "'extend_lens'"),
        ({**VERIFY, "extend_lens": [5]}, "'extend_lens'"),
        ({**EXTEND, "prefix_lens": [1]}, "'prefix_lens'"),
        ({**EXTEND, "seq_lens": [9, 9]}, "'seq_lens'"),
        ({**VERIFY, "cp_mode": "zigzag"}, "'cp_mode'"),
        ({**VERIFY, "cp_v2": 1}, "'cp_v2'"),
        ({**VERIFY, "hidden_states": False}, "'hidden_states'"),
        ({**VERIFY, "graph": {"algo": "EAGLE", "runner": []}}, "'graph'"),
        ({**VERIFY, "steps": 1000}, "'steps'"),
        ({**VERIFY, "atn_tp": 4}, "'atn_tp'"),
        ({"id": 7, "input": VERIFY}, "'id'"),
        ({"id": "x", "input": []}, "'input'"),
        ({"cases": VERIFY}, "'cases'"),
        ({"cases": [], "extra": 1}, "'extra'"),
        ([], "0 cases"),
        ("TARGET_VERIFY", "not an object"),
    ],
)
def test_a_mistake_is_named(case: Any, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(case)
    assert named in caught.value.why
    assert caught.value.hint


def test_an_unknown_plan_is_refused() -> None:
    with pytest.raises(UsageError):
        make(VERIFY, "during")  # type: ignore[arg-type]
