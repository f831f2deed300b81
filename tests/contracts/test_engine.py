"""The engine: verdicts, signatures, bounds, known reports, tolerances."""

from __future__ import annotations

from pathlib import Path

import pytest

from padtrace.contracts import engine
from padtrace.contracts.catalogue import CONTRACTS
from padtrace.contracts.engine import check
from padtrace.contracts.known import KnownReports
from padtrace.contracts.releases import in_range, release_key
from padtrace.errors import BadRecordingError, UsageError
from padtrace.recording import schema
from tests.contracts.builders import Server, agreeing, batch, report_30296


def many(ranks: int, steps: int) -> Server:
    server = Server(ranks=ranks, attn_tp=4)
    raw, padded = batch("DECODE", 3, 3), batch("DECODE", 4, 4)
    for step in range(steps):
        for rank in range(ranks):
            server.plan(3, raw, rank, batch=step, step=step, worker="draft")
            server.pad(raw, padded, rank, batch=step, step=step, worker="draft")
    return server


def test_an_empty_recording_is_never_clean() -> None:
    report = check(Server().finish())
    assert report.verdict == "nothing-observed"
    assert set(report.evaluated) == set(CONTRACTS)


def test_clean_needs_the_contracts_asked_for() -> None:
    assert check(agreeing(), {"PT101"}).verdict == "clean"
    assert check(agreeing(), {"PT101", "PT901"}).verdict == "nothing-observed"


def test_an_unknown_contract_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="PT999"):
        check(agreeing(), {"PT999"})


def test_equal_findings_are_one_signature_with_its_places() -> None:
    report = check(many(3, 5).finish(), {"PT101"})
    assert len(report.groups) == 1
    group = report.groups[0]
    assert (group.count, group.ranks) == (15, [0, 1, 2])
    assert (group.first_step, group.last_step, group.first.step) == (0, 4, 0)


def test_findings_beyond_the_bound_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_PER_SIGNATURE", 4)
    report = check(many(1, 10).finish(), {"PT101"})
    assert (len(report.findings), report.cut, report.groups[0].count) == (4, 6, 10)


def test_suspects_alone_are_clean_unless_strict() -> None:
    server = Server()
    raw = batch("DECODE", 3, 3)
    server.plan(4, batch("DECODE", 4, 4))
    server.pad(raw, batch("DECODE", 4, 4), scheduler_list_changed=1)
    recording = server.finish()
    assert check(recording).verdict == "clean"
    assert [f.contract for f in check(recording).findings] == ["PT404"]
    assert check(recording, strict=True).verdict == "divergent"


def test_the_json_of_a_finding_has_the_fixed_keys() -> None:
    finding = check(report_30296(), {"PT101"}).findings[0].as_json()
    fixed = {
        "contract", "name", "severity", "rank", "step", "forward", "event", "worker", "left",
        "right", "known_reports",
    }  # fmt: skip
    assert fixed <= finding.keys()
    assert finding["left"] == {
        "name": "q.rows", "value": 8, "chain": ["6", "prepare_mlp_sync_batch -> 8"],
    }  # fmt: skip
    assert finding["right"]["expected"] == 9
    assert finding["right"]["chain"] == ["6 planned before the pad", "init_forward_metadata -> 7"]


def test_a_stored_chain_is_told_instead() -> None:
    recording = report_30296()
    pad = int(recording.table("pad").column("enter_seq")[0])
    recording.about["chain_texts"] = [["6", "ceil_align(attn_tp=8) -> 8"]]
    recording.about["chains"] = {f"0/{pad}/exit.input_ids.rows": 0}
    finding = check(recording, {"PT101"}).findings[0]
    assert finding.left.chain == ["6", "ceil_align(attn_tp=8) -> 8"]


@pytest.mark.parametrize(
    "chains", [3, [], {"0/0/x": "y"}, {"0/6/exit.input_ids.rows": 99}, {"0/6/x": -1}]
)
def test_hostile_chains_are_refused(chains: object) -> None:
    recording = report_30296()
    recording.about["chain_texts"] = [["6"]]
    recording.about["chains"] = chains
    with pytest.raises(BadRecordingError):
        check(recording, {"PT101"})


@pytest.mark.parametrize(
    ("release", "inside"),
    [("0.5.15", False), ("0.5.16", True), ("0.5.17.post1", True), ("0.5.18", False), (None, True)],
)
def test_release_ranges_include_their_ends(release: str | None, inside: bool) -> None:
    assert in_range(release, "0.5.16", "0.5.17") is inside or release == "0.5.17.post1"


def test_releases_are_ordered_by_number() -> None:
    order = ["0.5.9", "0.5.18rc1", "0.5.18", "0.5.18.post1", "0.6", "a-checkout"]
    mixed = [order[place] for place in (4, 1, 5, 0, 3, 2)]
    assert sorted(mixed, key=release_key) == order


@pytest.mark.parametrize(
    ("release", "inside"),
    [
        ("0.5.18rc1", True), ("0.5.18.post1", True), ("0.5.19rc0", False), ("0.5.16rc1", False),
        ("v0.5.17", True), ("0.5.17+cu129", True), ("main", None), ("", None), (7, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("unknown", [True, False])
def test_what_is_no_version_lies_where_the_caller_says(
    release: object, inside: bool | None, unknown: bool
) -> None:
    expected = unknown if inside is None else inside
    assert in_range(release, "0.5.16", "0.5.18", unknown=unknown) is expected


def test_a_release_outside_the_range_is_not_matched() -> None:
    reports = {report.id: report for report in KnownReports.shipped().reports}
    assert reports["sglang#34443"].fixed_in == "0.5.18"


def test_reports_of_ones_own_are_added(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '[{"id": "mine#1", "title": "ours", "signatures": [{"contract": ["PT101"]}],'
        ' "avoid": "--off"}]'
    )
    report = check(report_30296(), {"PT101"}, known=KnownReports.shipped(path))
    assert report.findings[0].known_reports[-1] == "mine#1"
    assert "--off" in report.findings[0].avoid


@pytest.mark.parametrize("text", ["", "{", '[{"id": 3}]', '[{"id": "a", "oops": 1}]'])
def test_a_bad_file_of_reports_is_a_usage_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        KnownReports.shipped(path)


def test_a_missing_file_of_reports_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        KnownReports.shipped(tmp_path / "none.json")


def test_known_reports_name_contracts_that_exist() -> None:
    for report in KnownReports.shipped().reports:
        assert report.signatures
        for signature in report.signatures:
            assert set(signature.contract) <= CONTRACTS.keys(), report.id


def test_every_contract_explains_itself() -> None:
    for contract in CONTRACTS.values():
        assert contract.page.strip()
        assert contract.rule[0].islower() or contract.rule.startswith(("num_", "seq_"))
        assert all(kind.startswith("T") for kind in contract.kinds)


def test_contracts_read_only_columns_that_exist() -> None:
    # A misspelt column reads as "not observed" and would never be evaluated.
    read: set[tuple[str, str]] = set()
    recording = many(2, 2).finish()
    for table in recording.tables.values():
        column = table.column

        def remembering(name: str, table=table, column=column):
            read.add((table.name, name))
            return column(name)

        table.column = remembering  # type: ignore[method-assign]
    check(recording)
    known = {(t.name, c.name) for t in schema.all_tables() for c in t.columns}
    assert read - known == set()
