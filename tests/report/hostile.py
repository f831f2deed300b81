"""A recording whose every string tries to take over the screen, and its harmless twin.

Both are made by one function, and a string of the twin is as long as the escaped one is on a
screen, so that the two screens have the same lines.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console

from padtrace.contracts.engine import check
from padtrace.contracts.known import KnownReports
from padtrace.explore.across import Across, Change, OnRelease, forwards_of
from padtrace.explore.differences import compare
from padtrace.explore.rerun import Outcome
from padtrace.one_line import one_line
from padtrace.recording.model import Recording
from padtrace.report import (
    across_view,
    differences_view,
    explain_view,
    info_view,
    ranks_view,
    replay_view,
    rows_view,
    share_view,
    show_view,
    terminal,
    verdicts,
)
from padtrace.report.words import console
from padtrace.sharing.check import share_check
from tests.contracts.builders import Server, batch

# A title, a cleared screen, a colour, an 8-bit control, markup, a forged verdict on a line of its
# own, a carriage return, marks that turn the direction, one without a shape. No blank: it would be
# a place to wrap, and the twin has none.
HOSTILE = (
    "\x1b]0;t\x07\x1b[2J\x1b[31m\x9b1m[red]a[/][link=http://e]b[/link]:boom:"
    "\nclean\r\tc\x08\x7f\u202ed\u2066\u200be\u2028\ufeff\U000e0001"
)
ESCAPED = one_line(HOSTILE)
KNOWN = KnownReports.shipped()
Words = Callable[[str], str]


def hostile(name: str) -> str:
    return f"{name}{HOSTILE}"


def harmless(name: str) -> str:
    return name + "x" * len(ESCAPED)


def recording(words: Words, planned: int = 1) -> Recording:
    """Two ranks whose plan met a shorter q than the pad made, every name from `words`."""
    facts = {
        "sglang": {"version": words("0.5.18"), "commit": words("abc")},
        "server_args": {"model_path": words("model"), words("key"): words("value")},
        "environment": {words("SGLANG_"): words("1")},
        "host": words("host"),
        "fingerprints": {words("module.function"): words(f"hash{planned}")},
    }
    server = Server(ranks=2, attn_tp=2, source="server", facts=facts)
    server.builder._about.update(
        sglang=words("0.5.18"), command=words("python"), notes=[words("note")], tier="shape"
    )
    mode = words("DECODE")
    raw, padded = batch(mode, 1, 1), batch(mode, 2, 2, dp_padding_mode=words("MAX_LEN"))
    worker = words("draft")
    for rank in range(2):
        place: dict[str, Any] = {"step": 3, "worker": worker}
        server.add(
            "forward", rank, forward=2, forward_mode=mode, can_run_graph=0, entry=raw, **place
        )
        server.plan(planned, raw, rank, **place)
        server.pad(raw, padded, rank, forward=2, **place)
        server.add(
            "launch", rank, forward=2, failed=1, num_splits__rows=planned + 1,
            function=words("flash_mla"), q__shape=[2, 1, 64, 576], **place,
        )  # fmt: skip
        server.add(
            "error", rank, forward=2, type=words("RuntimeError"), message=words("message"),
            function=words("flash_mla"), frames=[words("frame")], **place,
        )  # fmt: skip
    hooks = {
        words("pad"): {"status": "absent", "note": words("note")},
        "graph": {"status": words("found")},
    }
    kernel = {
        "name": words("kernel"), "why": words("why"), "outcomes": {words("refused"): 2},
        "without_answer": [words("text")],
    }  # fmt: skip
    replay = {
        "outside_edits": 1,
        "outside_edit_list": [{"field": words("field")}],
        "not_replayed": {words("reason"): 2},
        "kernel": kernel,
    }
    return server.finish({"hooks": hooks, "blind": {"missing_ranks": [5]}, "replay": replay})


def outcome(words: Words) -> Outcome:
    """A replay of it as it could have been."""
    recorded, replayed = recording(words), recording(words, planned=2)
    differences = compare(recorded, replayed)
    return Outcome(
        recorded, replayed, check(recorded), check(replayed), differences, True, "divergent"
    )


def _check(out: Console, words: Words) -> None:
    made = recording(words)
    report = check(made, known=KNOWN)
    terminal.print_report(out, made, report, KNOWN, verdicts.of_report(report), path=words("rec"))


def _diff(out: Console, words: Words) -> None:
    made = recording(words)
    report = check(made, known=KNOWN)
    judgement = verdicts.of_report(report)
    terminal.print_headline(out, judgement)
    rows_view.print_rows(out, made)
    ranks_view.print_divergent_step(out, made, report)
    terminal.print_report(out, made, report, KNOWN, judgement, path=words("rec"), headline=False)


def _two(out: Console, words: Words) -> None:
    files = (recording(words), recording(words, planned=2))
    names = (words("left"), words("right"))
    differences_view.print_differences(out, compare(*files), names, files)


def _show(out: Console, words: Words) -> None:
    made = recording(words)
    show_view.print_events(out, made, show_view.select(made), limit=0)


def _info(out: Console, words: Words) -> None:
    info_view.print_info(out, recording(words), words("rec"))


def _share(out: Console, words: Words) -> None:
    share_view.print_share_check(out, share_check(recording(words)), words("rec"))


def _ranks(out: Console, words: Words) -> None:
    ranks_view.print_ranks(out, ranks_view.side_by_side(recording(words)))


def _replay(out: Console, words: Words) -> None:
    view = replay_view.ReplayView(out, quiet=False)
    result = outcome(words)
    view.before(result.recorded, KNOWN)
    view.after(result, KNOWN, words("rec"), None)


def _across(out: Console, words: Words) -> None:
    result = outcome(words)
    forwards = {rows.key: rows for rows in forwards_of(result.replayed).values()}
    ran = [OnRelease(words(release), result, forwards) for release in ("0.5.17", "0.5.18")]
    change = Change(ran[0].release, ran[1].release, result.differences)
    across_view.print_across(
        out, Across(result.recorded, ran, [change], next(iter(forwards)), "divergent")
    )


def _explain(out: Console, words: Words) -> None:
    from padtrace.errors import UsageError

    try:
        explain_view.print_contracts(out, words("PT"), json=False)
    except UsageError as error:
        for line in error.lines():
            out.print(line)


VIEWS: dict[str, Callable[[Console, Words], None]] = {
    "info": _info,
    "share-check": _share,
    "check": _check,
    "diff": _diff,
    "diff-two-files": _two,
    "show": _show,
    "ranks": _ranks,
    "replay": _replay,
    "across": _across,
    "explain": _explain,
}


def screen(view: str, words: Words, width: int) -> str:
    file = io.StringIO()
    VIEWS[view](console(file, width=width), words)
    return file.getvalue()
