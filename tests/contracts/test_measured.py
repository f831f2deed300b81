"""The contracts on what seven (or three) releases really gave: found where it is, silent elsewhere.

The expected verdicts are the harness's own `match_*` fields and the facts listed with the cases.
"""

from __future__ import annotations

from typing import Any

import pytest

from padtrace.contracts.engine import check
from padtrace.contracts.model import Severity
from tests.cases.oracle import load
from tests.contracts.measured import live_plan, recording_of

CASES = {case["id"]: case for case in load()["cases"]}
RELEASES = sorted({release for case in CASES.values() for release in case["expected"]})
HEALTHY = ("ok-verify-tp1", "ok-dext-tp1-dp2-even", "ok-verify-tp4-divisible", "ok-decode-single")


def found(name: str, release: str, plan: str | None = None) -> dict[str, Any]:
    """First finding by contract id, of one case."""
    report = check(recording_of(CASES[name], release, plan))
    return {group.first.contract: group.first for group in reversed(report.groups)}


def needs(*releases: str) -> list[str]:
    return [release for release in releases if release in RELEASES] or ["none here"]


@pytest.mark.parametrize("release", RELEASES)
def test_pt101_says_what_the_harness_measured(release: str) -> None:
    compared = 0
    for name, case in CASES.items():
        measured = case["expected"][release]
        for plan in ("before", "after"):
            made = measured.get("dsa", {}).get(plan, {})
            if "num_splits" not in made or "error" in measured["pad"]:
                continue
            report = check(recording_of(case, release, plan), {"PT101"})
            assert report.evaluated["PT101"] == 1, (name, plan)
            assert (not report.findings) == made["num_splits_ok"], (name, plan)
            compared += 1
    assert compared > 90


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_cases_give_no_finding(name: str, release: str) -> None:
    report = check(recording_of(CASES[name], release))
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("release", needs("0.5.18", "0.5.20", "0.5.23"))
@pytest.mark.parametrize("name", ["none-draft-hs", "none-dext-hs"])
def test_fact_1_the_unpad_raises_on_none(name: str, release: str) -> None:
    finding = found(name, release)["PT701"]
    assert finding.severity is Severity.CRASH
    assert "taking the padding back" in finding.sentence
    assert "None" in finding.sentence
    assert "sglang#30877" in finding.known_reports


@pytest.mark.parametrize("release", RELEASES)
def test_fact_2_the_pad_edits_lists_of_others(release: str) -> None:
    findings = found("dp-maxlen-dext-1v4", release)
    assert ("PT803" in findings) == (release == "0.5.20")
    if release == "0.5.20":
        assert (findings["PT803"].left.value, findings["PT803"].right.value) == (1, 4)


@pytest.mark.parametrize("release", RELEASES)
def test_fact_3_one_plan_counts_in_two_ways(release: str) -> None:
    findings = found("dp-maxlen-dext-1v4", release, "after")
    assert "PT101" not in findings
    finding = findings["PT103"]
    assert (finding.right.name, finding.right.value) in {
        ("cu_seqlens_q.rows", 5),
        ("dsa_seqlens_expanded.rows", 4),
    }


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("name", "q", "table"), [("dp-maxlen-dext-1v4", 16, 4), ("idle-verify-3v0w6", 20, 3)]
)
def test_facts_4_and_5_a_short_page_table_is_told(name, q, table, release) -> None:
    recording = recording_of(CASES[name], release)
    report = check(recording)
    told = [group.first for group in report.tolerated if group.first.contract == "PT102"]
    assert (told[0].left.value, told[0].right.value) == (q, table)
    assert "that fits" in told[0].sentence
    strict = check(recording, {"PT102"}, strict=True)
    assert strict.verdict == "divergent"
    assert strict.findings[0].severity is Severity.SUSPECT


@pytest.mark.parametrize("release", RELEASES)
def test_fact_9_out_cache_loc_is_never_restored(release: str) -> None:
    report = check(recording_of(CASES["ok-decode-tp2-post"], release))
    names = [group.first.right.name for group in report.tolerated]
    assert "out_cache_loc.rows after the unpad" in names


@pytest.mark.parametrize("release", needs("0.5.17", "0.5.18", "0.5.20", "0.5.23"))
def test_fact_12_zigzag_shards_are_planned_whole(release: str) -> None:
    finding = found("ext-cp-zigzag-dsa", release)["PT101"]
    assert (finding.left.value, finding.right.value, finding.sign) == (36, 67, "longer")


@pytest.mark.parametrize("release", RELEASES)
def test_34443_is_found_where_it_is(release: str) -> None:
    findings = found("cpv2-verify-b1w6-cp8", release)
    assert ("PT101" in findings) == (release in ("0.5.16", "0.5.17"))
    if "PT101" in findings:
        assert "sglang#34443" in findings["PT101"].known_reports


@pytest.mark.parametrize("release", RELEASES)
def test_30296_is_found_in_every_release(release: str) -> None:
    finding = found("tp4-dext-b3w6", release)["PT101"]
    assert finding.planned == "before the pad"
    assert "sglang#30296" in finding.known_reports


def test_the_live_plan_is_the_one_the_cases_name() -> None:
    assert live_plan(CASES["tp4-dext-b3w6"]) == "before"
    assert live_plan(CASES["tp8-verify-b1w6"]) == "after"
