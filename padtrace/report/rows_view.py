"""`padtrace diff REC`: rows of q against rows of num_splits, forward kind by forward kind."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from padtrace.contracts.num_splits import RowPair, row_pairs
from padtrace.recording.model import Recording
from padtrace.report.words import plain

MAX_LINES = 20


def print_rows(out: Console, recording: Recording) -> None:
    """One line per kind of forward and pair of numbers; those that disagree first."""
    pairs = row_pairs(recording)
    if not pairs:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("forward", overflow="fold")
    for heading in ("q rows", "num_splits", "needs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("sign")
    table.add_column("planned")
    table.add_column("times", justify="right", no_wrap=True)
    for pair, count in pairs[:MAX_LINES]:
        table.add_row(*_cells(pair), f"{count:,}")
    out.print(Padding(table, (0, 0, 1, 2)))
    rest = pairs[MAX_LINES:]
    if rest:
        agree = sum(count for _, count in rest)
        out.print(
            Padding(plain(f"{len(rest)} more kinds of forward ({agree:,} times)"), (0, 0, 1, 2))
        )


def _cells(pair: RowPair) -> tuple[str | Text, ...]:
    style = "" if pair.sign == "agree" else "bold red"
    return (
        f"{pair.mode} ({pair.worker})",
        str(pair.q_rows),
        plain(str(pair.num_splits), style=style),
        str(pair.needs),
        plain(pair.sign, style=style),
        pair.planned.removesuffix(" the pad") if pair.planned else "",
    )
