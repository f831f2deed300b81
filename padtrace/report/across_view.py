"""`padtrace across`: one line per release, where it turns, and what changed between neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from padtrace.explore.across import Across, Change, OnRelease, Progress, Rows
from padtrace.recording.model import json_value
from padtrace.report import json_output
from padtrace.report.summary import case_of
from padtrace.report.words import MAX_MODE, MAX_PADDING, MAX_RELEASE, plain, plural

MAX_FIELDS = 6
_STYLES = {"clean": "green", "divergent": "bold red"}


@contextmanager
def progress(out: Console, *, quiet: bool) -> Iterator[Progress]:
    """A progress line on a terminal; nothing elsewhere."""
    if quiet or not out.is_terminal:
        yield lambda done, total, text: None
        return
    with out.status("loading SGLang") as status:
        yield lambda done, total, text: status.update(plain(text))


def print_across(out: Console, result: Across) -> None:
    """The table of the releases, with the turning points first."""
    style = _STYLES.get(result.verdict, "yellow")
    out.print(plain(headline(result), style=style))
    out.print()
    if result.shown is not None:
        out.print(plain(_place(result), style="dim"))
    out.print(Padding(_table(result), (0, 0, 1, 2)))
    _print_findings(out, result)
    for change in result.changes:
        _print_change(out, change)
    for entry in result.releases:
        if entry.error is not None:
            lines = "; ".join(entry.error.lines()[:2])
            out.print(plain(f"{entry.release} was not run: {lines}", style="yellow"))
    out.print(plain(verdict_line(result), style=style))


def headline(result: Across) -> str:
    """First bad and first good release in one line."""
    bad, good, before = result.first_bad, result.first_good, result.last_good_before
    ran = result.ran
    if bad is None:
        changed = sorted({change.after for change in result.changes if _rows_changed(change)})
        told = f"; rows change at {', '.join(changed)}" if changed else ""
        unjudged = [entry.release for entry in result.releases if entry.verdict != "clean"]
        open_ones = f"; not all judged on {', '.join(unjudged)}" if unjudged else ""
        return f"no divergence on {plural(len(ran), 'release')}{told}{open_ones}"
    if all(entry.verdict == "divergent" for entry in ran):
        return f"divergent on every release run: {', '.join(entry.release for entry in ran)}"
    parts = [f"first bad {bad}" + (f" (last good before it {before})" if before else "")]
    parts.append(f"first good after it {good}" if good else "no later release run is clean")
    return ", ".join(parts)


def verdict_line(result: Across) -> str:
    """How many releases gave each verdict."""
    counted: dict[str, int] = {}
    for entry in result.releases:
        counted[entry.verdict] = counted.get(entry.verdict, 0) + 1
    return ", ".join(f"{count} {verdict}" for verdict, count in counted.items())


def as_json(result: Across, path: str, *, allow_unjudged: bool = False) -> dict[str, Any]:
    """The findings object of the newest release run, with every release under "releases"."""
    newest = result.ran[-1].outcome
    assert newest is not None
    return {
        **json_output.findings_object(
            newest.replayed,
            newest.deciding,
            path=path,
            verdict=result.verdict,
            allow_unjudged=allow_unjudged,
        ),
        "first_bad": result.first_bad,
        "first_good": result.first_good,
        "releases": [_release_json(entry, path) for entry in result.releases],
        "changes": [
            {
                "before": change.before,
                "after": change.after,
                "differences": change.differences.as_json(),
                "comparison": change.differences.totals(),
            }
            for change in result.changes
        ],
    }


def _release_json(entry: OnRelease, path: str) -> dict[str, Any]:
    if entry.outcome is None:
        reason = entry.error.lines() if entry.error else []
        return {"release": entry.release, "verdict": entry.verdict, "error": reason}
    found = json_output.findings_object(
        entry.outcome.replayed,
        entry.outcome.deciding,
        path=path,
        differences=entry.outcome.differences,
        compared_with=entry.outcome.recorded,
        verdict=entry.verdict,
    )
    rows = [{name: getattr(r, name) for name in Rows.__slots__} for r in entry.forwards.values()]
    return {"release": entry.release, **found, "forwards": rows}


def _place(result: Across) -> str:
    assert result.shown is not None
    process, batch, step = result.shown
    case = case_of(result.recorded, process, batch)
    of_step = f", draft step {step}" if step > 0 else ""
    total = len({key for entry in result.ran for key in entry.forwards})
    more = f" (1 of {plural(total, 'padded forward')}; --json has all)" if total > 1 else ""
    return f"batch {batch}{of_step}{f', case {case}' if case else ''}{more}"


def _table(result: Across) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("release", overflow="ellipsis", max_width=MAX_RELEASE)
    table.add_column("verdict", no_wrap=True)
    for heading in ("q rows", "num_splits"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("padding", no_wrap=True, max_width=MAX_PADDING)
    table.add_column("mode", no_wrap=True, max_width=MAX_MODE)
    table.add_column("contracts", overflow="fold")
    before: Rows | None = None
    for entry in result.releases:
        rows = entry.forwards.get(result.shown) if result.shown else None
        table.add_row(*_cells(entry, rows, before))
        before = rows or before
    return table


def _cells(entry: OnRelease, rows: Rows | None, before: Rows | None) -> list[str | Text]:
    verdict = plain(entry.verdict, style=_STYLES.get(entry.verdict, "yellow"))
    if entry.outcome is None:
        return [entry.release, verdict]
    groups = entry.outcome.deciding.groups
    ids = ", ".join(dict.fromkeys(group.first.contract for group in groups))
    if rows is None:
        return [entry.release, verdict, "-", "-", "-", "-", ids]
    cells: list[str | Text] = [entry.release, verdict]
    for name in ("q_rows", "num_splits", "padding_mode"):
        value = getattr(rows, name)
        changed = before is not None and getattr(before, name) != value
        cells.append(plain("-" if value is None else str(value), style="bold" if changed else ""))
    return [*cells, rows.mode or "-", ids]


def _print_findings(out: Console, result: Across) -> None:
    for listed in result.findings().values():
        names = ", ".join(release for release, _ in listed)
        first = listed[0][1]
        out.print(plain(f"{first.contract} on {names}", style="bold"))
        known = f" - {first.known_reports[0]}" if first.known_reports else ""
        out.print(Padding(plain(f"{first.sentence}{known}"), (0, 0, 1, 2)))


def _print_change(out: Console, change: Change) -> None:
    fields = _telling(change)
    if not fields:
        return
    out.print(plain(f"{change.before} to {change.after}", style="bold"))
    for name, left, right, count in fields[:MAX_FIELDS]:
        times = f" ({count:,} times)" if count > 1 else ""
        out.print(Padding(plain(f"{name}: {left} -> {right}{times}"), (0, 0, 0, 2)))
    if len(fields) > MAX_FIELDS:
        out.print(
            Padding(plain(f"{len(fields) - MAX_FIELDS} more fields: see --json"), (0, 0, 0, 2))
        )
    out.print()


# What decides rows comes first; then what follows from it.
_FIRST = (
    *("pad.exit.dp_padding_mode", "pad.exit.input_ids.rows", "plan.planned.rows"),
    *("plan.num_splits.rows", "sync.counts_after", "graph.bucket_argument", "error.type"),
)
_NAMES = ("function", "backend", "hash", "frames", "message")


def _telling(change: Change) -> list[tuple[str, str, str, int]]:
    """Fields with two values, most telling first; names of functions are no behaviour."""
    found: dict[str, tuple[str, str]] = {}
    for difference in change.differences.differences:
        values = (json_value(difference.left), json_value(difference.right))
        if difference.field.rsplit(".", 1)[-1] not in _NAMES and "no attribute" not in map(
            str, values
        ):
            found.setdefault(difference.field, (str(values[0]), str(values[1])))
    rank = {name: position for position, name in enumerate(_FIRST)}
    ordered = sorted(found, key=lambda name: rank.get(name, len(rank)))
    by_field = change.differences.by_field
    lines = [(name, *found[name], by_field.get(name, 1)) for name in ordered]
    for side, counts in (
        (change.before, change.differences.only_left),
        (change.after, change.differences.only_right),
    ):
        lines += [(f"{kind} only on {side}", "", f"{n}", 1) for kind, n in counts.items()]
    return lines


def _rows_changed(change: Change) -> bool:
    fields: Sequence[str] = list(change.differences.by_field)
    return any(name in _FIRST[:4] for name in fields)
