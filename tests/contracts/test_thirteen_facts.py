"""Thirteen facts measured on SGLang's own code: each is found, on the releases that have it.

The facts and their numbers were measured by a harness that shares no code with padtrace
(`tests/cases`); the inputs are copied from there. Here each is replayed on every release that is
here, and what is told about it is looked at as its user would read it.

Three of them (4, 5 and 9) are on the path of every healthy server with speculative decoding and
uneven ranks: there they are told as declared harmless, and `--strict` counts them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from padtrace.contracts.engine import check
from padtrace.contracts.model import Finding, Report, Severity
from padtrace.explore.across import Across, assemble, of_outcome
from padtrace.explore.make import Plan, make
from padtrace.explore.rerun import Outcome, rerun
from padtrace.replay import releases, service
from padtrace.report import across_view
from tests.report.snapshots import rendered

pytestmark = pytest.mark.release

ALL = ("0.5.12", "0.5.15", "0.5.16", "0.5.17", "0.5.18", "0.5.20", "0.5.23")
INPUTS = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "thirteen_facts.json").read_text())
}
# (case, when it is planned); two cases are two ranks of one step.
RUNS: dict[str, tuple[tuple[str, ...], Plan]] = {
    **{name: ((name,), "auto") for name in INPUTS},
    "planned after": (("dp-maxlen-dext-1v4",), "after"),
    "two ranks": (("mix-verify-rank0", "mix-extend-rank1"), "auto"),
}


def _one_step(ids: tuple[str, ...]) -> list[dict[str, object]]:
    """Cases that are ranks of one step; without the number each is a step of its own."""
    return [{**INPUTS[one], "step": 1} for one in ids]


@cache
def _replays(version: str) -> dict[str, Outcome]:
    """Everything on one release, with one import of it."""
    with service.session():
        return {
            name: rerun(make(_one_step(ids), plan), sglang=version, kernels="off")
            for name, (ids, plan) in RUNS.items()
        }


def _on(version: str, name: str) -> Outcome:
    if releases.here(version) is None:
        pytest.skip(f"SGLang {version} is not here: padtrace releases fetch {version}")
    return _replays(version)[name]


def _found(report: Report, contract: str, field: str = "") -> Finding | None:
    for group in report.groups:
        if group.first.contract == contract and field in group.first.right.name:
            return group.first
    return None


def _tolerated(report: Report, contract: str, field: str) -> Finding:
    for group in report.tolerated:
        if group.first.contract == contract and field in group.first.right.name:
            return group.first
    raise AssertionError(f"{contract} {field} is not told")


def _numbers(finding: Finding) -> tuple[int | None, int | None]:
    return finding.left.value, finding.right.value


@cache
def _across(name: str) -> Across:
    here = [version for version in ALL if releases.here(version) is not None]
    if len(here) < 2:
        pytest.skip(
            "fewer than two SGLang releases are here: padtrace releases fetch 0.5.20 0.5.23"
        )
    results = [of_outcome(version, _on(version, name)) for version in here]
    return assemble(make(INPUTS[name]), results)


def _rows(result: Across) -> dict[str, Any]:
    assert result.shown is not None
    return {entry.release: entry.forwards[result.shown].numbers for entry in result.ran}


@pytest.mark.parametrize("version", ["0.5.18", "0.5.20", "0.5.23"])
@pytest.mark.parametrize(
    ("name", "error"), [("none-draft-hs", "AttributeError"), ("none-dext-hs", "TypeError")]
)
def test_1_the_unpad_raises_when_hidden_states_is_none(version, name, error) -> None:
    outcome = _on(version, name)
    finding = _found(outcome.report, "PT701")
    assert finding is not None
    assert finding.severity is Severity.CRASH
    assert "fails while taking the padding back" in finding.sentence
    assert "is None" in finding.sentence
    assert error in finding.sentence
    assert "forward_batch_info.py:" in finding.sentence
    assert outcome.verdict == "divergent"


@pytest.mark.parametrize("version", ALL)
def test_2_the_pad_edits_lists_that_a_plan_holds(version: str) -> None:
    report = _on(version, "dp-maxlen-dext-1v4").report
    for name in ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu"):
        finding = _found(report, "PT803", name)
        assert (finding is not None) == (version == "0.5.20"), name
        if finding is not None:
            assert _numbers(finding) == (1, 4)
            assert f"edited a list of others: {name}" in finding.sentence
            assert "plans made with it included" in finding.sentence


@pytest.mark.parametrize("version", ALL)
def test_3_a_plan_made_after_the_pad_counts_in_two_ways(version: str) -> None:
    """Seen where functions were called one by one; no release plans a draft-extend so."""
    outcome = _on(version, "planned after")
    assert (outcome.report.forwards.judged, outcome.verdict) == (0, "nothing-observed")
    (reason,) = outcome.replayed.coverage["driven"]["not_driven"]
    assert "before the pad" in reason


@pytest.mark.parametrize("version", ALL)
def test_4_the_page_table_is_shorter_than_q_beside_a_right_num_splits(version: str) -> None:
    outcome = _on(version, "dp-maxlen-dext-1v4")
    assert _found(outcome.report, "PT101") is None
    finding = _tolerated(outcome.report, "PT102", "page_table_1.rows")
    assert _numbers(finding) == (16, 4)
    assert "page_table_1 4, q has 16 rows" in finding.sentence
    assert "beside a num_splits of 17 that fits" in finding.sentence
    assert finding.tolerated is not None
    strict = check(outcome.replayed, {"PT102"}, strict=True)
    assert strict.verdict == "divergent"


@pytest.mark.parametrize("version", ALL)
def test_5_an_idle_rank_in_a_speculative_round_is_planned_by_request(version: str) -> None:
    outcome = _on(version, "idle-verify-3v0w6")
    for name in ("page_table_1", "dsa_seqlens_expanded"):
        finding = _tolerated(outcome.report, "PT102", f"{name}.rows")
        assert _numbers(finding) == (20, 3)
        assert f"{name} 3, q has 20 rows: the metadata of an idle rank" in finding.sentence
        assert "beside a num_splits of 21 that fits" in finding.sentence
    assert check(outcome.replayed, {"PT102"}, strict=True).verdict == "divergent"


@pytest.mark.parametrize("version", ALL)
def test_6_the_padding_mode_flips_between_plan_and_pad(version: str) -> None:
    """In a draft step, which SGLang plans before the pad."""
    report = _on(version, "dp-modeflip-draft").report
    finding = _found(report, "PT405")
    assert finding is not None
    assert "was planned as SUM_LEN (1 row) and padded as MAX_LEN" in finding.sentence
    assert "the padding mode flipped between the plan and the pad" in finding.sentence
    splits = _found(report, "PT101")
    assert splits is not None
    assert _numbers(splits) == (8, 2)


def test_7_decode_goes_sum_len_with_custom_all_reduce_in_0_5_23() -> None:
    result = _across("dp-customar-decode")
    for version, numbers in _rows(result).items():
        wanted = (4, 5, "SUM_LEN") if version == "0.5.23" else (10, 11, "MAX_LEN")
        assert numbers == wanted, version
    _change_is_told(result, "0.5.23", "pad.exit.dp_padding_mode: MAX_LEN -> SUM_LEN")


def test_8_prefill_is_padded_to_the_graph_bucket_in_0_5_23() -> None:
    result = _across("ext-prefill-graph-bucket")
    for version, (q, _, mode) in _rows(result).items():
        old = version in ("0.5.12", "0.5.15")
        assert mode == ("SUM_LEN" if old else "MAX_LEN"), version
        # From 0.5.23 on the attention layer is given the real rows of what was padded to 48.
        assert q == (33 if version == "0.5.23" else 34), version
    _change_is_told(result, "0.5.23", "pad.exit.input_ids.rows: 34 -> 48")
    relabelled = _rows(_across("ext-dec-prefill-graph"))
    for version, (q, _, _) in relabelled.items():
        old = version in ("0.5.12", "0.5.15")
        assert q == (4 if old else 3 if version == "0.5.23" else 34), version


@pytest.mark.parametrize("version", ALL)
def test_9_out_cache_loc_is_never_restored(version: str) -> None:
    outcome = _on(version, "ok-decode-tp2-post")
    for name in ("out_cache_loc", "input_ids", "lora_ids"):
        finding = _tolerated(outcome.report, "PT601", f"{name}.rows after the unpad")
        assert _numbers(finding) == (5, 6)
        assert f"{name} has 6 rows after the unpad" in finding.sentence
        assert "it is not restored" in finding.sentence
    strict = check(outcome.replayed, {"PT601"}, strict=True)
    assert _found(strict, "PT601", "out_cache_loc.rows") is not None


@pytest.mark.parametrize("version", ["0.5.17", "0.5.18", "0.5.20", "0.5.23"])
def test_9_seq_lens_sum_keeps_counting_the_padding(version: str) -> None:
    finding = _tolerated(_on(version, "tp2-decode-3v9").report, "PT603", "after the unpad")
    assert _numbers(finding)[0] == 300
    assert "the lengths add up to 300" in finding.sentence


@pytest.mark.parametrize("version", ALL)
def test_10_the_second_draft_step_hides_the_fault_of_the_first(version: str) -> None:
    """So it was where functions were called one by one; a server plans all steps ahead of them."""
    report = _on(version, "step2-draft-2v5").report
    assert _found(report, "PT802") is None
    first = _found(report, "PT101")
    assert first is not None
    assert (first.draft_step, *_numbers(first)) == (0, 8, 6)


@pytest.mark.parametrize("version", ALL)
def test_11_ranks_of_one_step_work_out_other_buffers(version: str) -> None:
    finding = _found(_on(version, "two ranks").report, "PT402")
    assert finding is not None
    assert set(_numbers(finding)) == {258, 44}
    assert "gathered buffer" in finding.sentence


@pytest.mark.parametrize("version", ["0.5.17", "0.5.18", "0.5.20", "0.5.23"])
def test_12_zigzag_context_parallel_is_planned_for_all_shards(version: str) -> None:
    finding = _found(_on(version, "ext-cp-zigzag-dsa").report, "PT101")
    assert finding is not None
    assert _numbers(finding) == (36, 67)
    assert "of which q has this rank's 36" in finding.sentence


def test_13_the_draft_worker_has_counts_of_its_own_in_0_5_23() -> None:
    result = _across("draftcounts-dext")
    for version, (q, splits, _) in _rows(result).items():
        assert (q, splits) == ((8, 9) if version == "0.5.23" else (12, 13)), version
    _change_is_told(result, "0.5.23", "pad.exit.input_ids.rows: 12 -> 8")


def _change_is_told(result: Across, version: str, line: str) -> None:
    if version in {entry.release for entry in result.ran}:
        text = rendered(lambda out: across_view.print_across(out, result), 160)
        assert line in text
