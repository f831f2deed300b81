"""The corpus itself, and its run on every release that is here."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from padtrace.errors import UsageError
from padtrace.explore import corpus
from padtrace.replay import releases
from tests.contracts.builders import agreeing, report_30296

FILE = Path(__file__).resolve().parents[2] / "recordings" / "corpus" / "corpus.json"
CORPUS = corpus.load(FILE)


def _case(kind: str, finds: list[str], **expected: object) -> corpus.Case:
    raw = {
        "id": "one", "kind": kind, "input": {}, "source": "", "obtained": "",
        "expected": {"0.5.18": {"finds": finds, **expected}},
    }  # fmt: skip
    return msgspec.convert(raw, corpus.Case)


def test_every_case_states_every_release_and_its_source() -> None:
    names = [case.id for case in CORPUS.cases]
    assert len(set(names)) == len(names)
    for case in CORPUS.cases:
        assert {*case.expected, *case.left_out} == set(CORPUS.releases), case.id
        assert case.source, case.id
        assert case.obtained, case.id
        found = any(expected.finds for expected in case.expected.values())
        assert found == (case.kind == "report"), case.id
        assert corpus.recording_of(case).rows("batch") >= 1


def test_reports_and_healthy_baselines_are_equal_in_number() -> None:
    kinds = [case.kind for case in CORPUS.cases]
    assert kinds.count("report") == kinds.count("healthy") >= 20


def test_no_report_is_both_decided_and_undecided() -> None:
    decided = {report for case in CORPUS.cases for report in case.reports}
    assert not decided & {entry.report for entry in CORPUS.undecided}
    assert all(entry.why for entry in CORPUS.undecided)


@pytest.mark.parametrize("name", ["./0.5.18", "/sglang", "installed"])
def test_a_corpus_names_releases_and_no_path(tmp_path: Path, name: str) -> None:
    file = tmp_path / "corpus.json"
    file.write_text(json.dumps({"about": "", "releases": [name], "cases": []}))
    with pytest.raises(UsageError, match="is no version"):
        corpus.load(file)


def test_a_miss_an_alarm_and_a_wrong_number_are_told() -> None:
    found = corpus.judge(
        _case("report", ["PT101"], q_rows=8, num_splits=7), "0.5.18", report_30296()
    )
    assert found.wrong == ()
    missed = corpus.judge(_case("report", ["PT101"]), "0.5.18", agreeing())
    assert missed.wrong == ("PT101 is not found",)
    alarm = corpus.judge(_case("healthy", []), "0.5.18", report_30296())
    assert alarm.wrong[0].startswith("PT101 is a false alarm: num_splits 7, needs 9")
    number = corpus.judge(_case("report", ["PT101"], q_rows=9), "0.5.18", report_30296())
    assert number.wrong == ("q_rows is 8, measured 9",)
    result = corpus.Result([found, missed, alarm])
    assert result.line() == "corpus: 0 of 1 found, 1 false alarms on 1 healthy"
    assert not result.complete


def test_an_unreadable_corpus_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps({"about": "", "releases": [], "cases": [{"id": 1}]}))
    for wrong in (path, tmp_path / "none.json"):
        with pytest.raises(UsageError):
            corpus.load(wrong)


def test_a_release_that_cannot_be_had_is_counted_as_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PADTRACE_CACHE": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PADTRACE_RELEASES", raising=False)
    told: list[str] = []
    result = corpus.run(CORPUS, ["0.5.18"], progress=told.append)
    assert list(result.not_run) == ["0.5.18"]
    assert not result.complete
    assert "not run" in told[0]


@pytest.mark.release
@pytest.mark.parametrize("version", CORPUS.releases)
def test_every_report_is_found_and_no_alarm_is_false(version: str) -> None:
    if releases.here(version) is None:
        pytest.skip(f"SGLang {version} is not here: padtrace releases fetch {version}")
    result = corpus.run(CORPUS, [version], progress=lambda text: None)
    wrong = [(e.case.id, line) for e in result.judged for line in e.wrong]
    assert wrong == []
    assert result.not_run == {}
    assert len(result.judged) == sum(version in case.expected for case in CORPUS.cases) > 40
