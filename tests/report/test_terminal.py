"""The terminal reports at 80 and 160 columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console

from padtrace.contracts.engine import check
from padtrace.contracts.known import KnownReports
from padtrace.explore.differences import compare
from padtrace.recording.model import Recording
from padtrace.report import (
    differences_view,
    explain_view,
    info_view,
    rows_view,
    share_view,
    show_view,
    terminal,
    verdicts,
    words,
)
from padtrace.sharing.check import share_check
from tests.contracts.builders import Server, agreeing, batch, report_30296, report_34443
from tests.report.snapshots import compare_with_snapshot, rendered

KNOWN = KnownReports.shipped()


def several_ranks() -> Recording:
    """A draft decode planned before the pad on four ranks, the kernel's refusal on two of them."""
    server = Server(ranks=4, attn_tp=2, source="server")
    raw, padded = batch("DECODE", 1, 1), batch("DECODE", 2, 2)
    for rank in range(4):
        server.plan(1, raw, rank, worker="draft", step=97, page_table_1__rows=1)
        server.pad(raw, padded, rank, worker="draft", step=97, forward=2)
        if rank < 2:
            server.add(
                "launch", rank, worker="draft", step=97, forward=2, failed=1, num_splits__rows=2,
                function="flash_mla_with_kvcache", q__shape=[2, 1, 64, 576], cache_seqlens__rows=1,
            )  # fmt: skip
            server.add(
                "error", rank, worker="draft", step=97, forward=2, type="RuntimeError",
                function="flash_mla_with_kvcache", message="num_splits must have shape (b+1)",
            )  # fmt: skip
    hooks = {"pad": {"status": "found"}, "graph": {"status": "absent"}}
    blind = {"missing_ranks": [4, 5], "dropped": {"0": 3}, "graph_forwards": {"0": 7}}
    return server.finish({"hooks": hooks, "blind": blind})


def held_more() -> Recording:
    """What an older padtrace wrote, and a stranger's note."""
    recording = several_ranks()
    recording.facts[0]["host"] = "stables"
    recording.facts[0]["server_args"] = {"host": "10.2.3.4", "api_key": "horse"}
    recording.about["notes"] = ["mail horse@stables.example \x1b[31m", "rank 3 ended suddenly"]
    return recording


def reported(recording: Recording) -> Callable[[Console], None]:
    def printer(out: Console) -> None:
        report = check(recording)
        judgement = verdicts.of_report(report)
        terminal.print_headline(out, judgement)
        rows_view.print_rows(out, recording)
        terminal.print_report(out, recording, report, KNOWN, judgement, path="REC", headline=False)

    return printer


def compared(left: Recording, right: Recording) -> Callable[[Console], None]:
    def printer(out: Console) -> None:
        result = compare(left, right)
        differences_view.print_differences(out, result, ("A", "B"), (left, right))

    return printer


PRINTERS: dict[str, Callable[[Console], None]] = {
    "diff-30296": reported(report_30296()),
    "diff-34443": reported(report_34443()),
    "diff-clean": reported(agreeing()),
    "diff-ranks": reported(several_ranks()),
    "diff-nothing": reported(Server(source="made").finish()),
    "compare-parted": compared(report_30296(), report_30296(16)),
    "compare-alike": compared(report_30296(), report_30296()),
    "info": lambda out: info_view.print_info(out, several_ranks(), "crash.safetensors"),
    "share-check": lambda out: share_view.print_share_check(out, share_check(several_ranks())),
    "share-check-fails": lambda out: share_view.print_share_check(out, share_check(held_more())),
    "show": lambda out: show_view.print_events(
        out, several_ranks(), show_view.select(several_ranks(), rank=1), limit=0
    ),
    "explain": lambda out: explain_view.print_contracts(out, "PT101", json=False),
}


@pytest.mark.parametrize("name", PRINTERS)
def test_the_report_reads_as_it_was_read(name: str) -> None:
    compare_with_snapshot(name, rendered(PRINTERS[name], 80))


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("name", PRINTERS)
def test_no_line_is_wider_than_the_console(name: str, width: int) -> None:
    lines = rendered(PRINTERS[name], width).splitlines()
    assert lines
    assert max(len(line) for line in lines) <= width
    assert all(line == line.rstrip() for line in lines)


def test_the_first_line_is_the_diagnosis() -> None:
    first = rendered(PRINTERS["diff-30296"], 160).splitlines()[0]
    assert first == (
        "num_splits 7, needs 9: the FlashMLA metadata of DRAFT_EXTEND_V2 (draft worker) were "
        "planned for 6 rows before the pad made q 8 rows - sglang#30296"
    )


def test_one_signature_on_several_ranks_is_told_once() -> None:
    text = rendered(PRINTERS["diff-ranks"], 160)
    assert text.count("num_splits has one entry more than q has rows") == 1
    assert "4 times on ranks 0-3, step 97" in text


def test_blindness_is_told() -> None:
    text = rendered(PRINTERS["diff-ranks"], 160)
    for told in ("ranks without a file: 4, 5", "7 forwards ran in replayed graphs", "3 events"):
        assert told in text


def test_two_chains_part_where_they_differ() -> None:
    finding = check(report_30296(), {"PT101"}).findings[0]
    finding.left.chain = ["1", "x num_tokens_per_req=6 -> 6", "ceil_align(attn_tp=8) -> 8"]
    finding.right.chain = ["1", "x num_tokens_per_req=6 -> 6", "planned before the pad -> 6"]
    assert terminal.parted_at(finding) == (
        "after 6: ceil_align(attn_tp=8) -> 8  |  planned before the pad -> 6"
    )


def test_colours_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in rendered(PRINTERS["diff-30296"], 80)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([], "rank unknown"), ([1, 3], "ranks 1, 3")],
)
def test_ranks_are_told_as_runs(ranks: list[int], text: str) -> None:
    assert words.ranks_text(ranks) == text
