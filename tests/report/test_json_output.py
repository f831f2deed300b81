"""The JSON object that other programs rely on."""

from __future__ import annotations

import json

from padtrace.contracts.engine import check
from padtrace.explore.differences import compare
from padtrace.recording import schema
from padtrace.report import json_output, show_view
from padtrace.sharing.check import share_check
from tests.contracts.builders import agreeing, report_30296
from tests.report.test_terminal import several_ranks


def made(recording, **more):
    report = check(recording)
    return json.loads(json_output.text(json_output.findings_object(recording, report, **more)))


def test_the_fixed_keys_are_there() -> None:
    value = made(report_30296(), path="x.safetensors")
    assert list(value)[:7] == [
        "format", "verdict", "recording", "sglang", "coverage", "findings", "findings_cut",
    ]  # fmt: skip
    assert value["format"] == "padtrace.findings/1"
    assert value["verdict"] == "divergent"
    assert value["sglang"] == {"version": "0.5.18", "source": None, "fingerprints": "unknown"}
    assert value["coverage"]["contracts"]["PT101"] == {"evaluated": 1, "skipped": {}}
    assert value["differences"] == []
    assert value["recording"]["path"] == "x.safetensors"


def test_a_finding_states_both_sides() -> None:
    finding = made(report_30296())["findings"][0]
    assert (finding["contract"], finding["severity"], finding["worker"]) == (
        "PT101", "crash", "draft",
    )  # fmt: skip
    assert (finding["left"]["name"], finding["left"]["value"]) == ("q.rows", 8)
    assert (finding["right"]["name"], finding["right"]["value"]) == ("num_splits.rows", 7)
    assert (finding["rank"], finding["step"], finding["forward"]) == (0, 1, 0)


def test_what_was_never_evaluated_is_listed() -> None:
    contracts = made(agreeing())["coverage"]["contracts"]
    assert contracts["PT301"]["evaluated"] == 0
    assert contracts["PT301"]["skipped"]


def test_differences_are_in_the_same_object() -> None:
    left, right = report_30296(), report_30296(16)
    value = made(right, differences=compare(left, right), compared_with=left)
    assert value["differences"][0]["field"] == "pad.exit.input_ids.rows"
    assert value["differences"][0].keys() >= {
        "field", "left", "right", "rank", "step", "forward", "event",
    }  # fmt: skip
    assert value["comparison"]["different_values"] == 1


def test_fingerprints_match_differ_or_are_unknown() -> None:
    left, right = agreeing(), agreeing()
    assert made(right, compared_with=left)["sglang"]["fingerprints"] == "unknown"
    left.facts[0]["fingerprints"] = right.facts[0]["fingerprints"] = {"pad": "aa"}
    assert made(right, compared_with=left)["sglang"]["fingerprints"] == "match"
    right.facts[0] = {**right.facts[0], "fingerprints": {"pad": "bb"}}
    assert made(right, compared_with=left)["sglang"]["fingerprints"] == "differ"


def test_show_prints_every_column_by_its_name() -> None:
    recording = report_30296()
    chosen = show_view.select(recording, kind="pad")
    event = json.loads(next(show_view.json_lines(recording, chosen)))
    assert event["event"] == "pad"
    assert set(event) - {"event"} == {column.name for column in schema.event_columns("pad")}
    assert event["exit"]["input_ids.rows"] == 8
    assert event["exit"]["positions.rows"] == "not observed"


def test_show_selects_by_rank_step_and_forward() -> None:
    recording = several_ranks()
    assert len(show_view.select(recording)) == 12
    assert len(show_view.select(recording, rank=0)) == 4
    assert len(show_view.select(recording, rank=3, kind="pad")) == 1
    assert show_view.select(recording, step=1) == []
    assert len(show_view.select(recording, forward=2)) == 8


def test_events_come_in_the_order_in_which_they_happened() -> None:
    recording = several_ranks()
    kinds = [kind for kind, _ in show_view.select(recording, rank=0)]
    assert kinds == ["plan", "pad", "launch", "error"]


def test_share_check_holds_for_shapes_only() -> None:
    recording = agreeing()
    assert share_check(recording).holds
    recording.about["tier"] = "full"
    assert not share_check(recording).holds
    recording.about["tier"] = "shape"
    recording.strings.append("x" * 5000)
    assert not share_check(recording).holds
