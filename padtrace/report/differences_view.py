"""`padtrace diff A B` for people: where two recordings first part, and in what."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from padtrace.explore.differences import Difference, Differences
from padtrace.recording.fingerprint_match import differing_fingerprints
from padtrace.recording.model import Recording, json_value
from padtrace.report.words import plain, plural

MAX_FIELDS = 20
MAX_EDITS = 12
_WIDE = 110  # columns from which the place of the first difference has room


def headline(result: Differences) -> str:
    """One line: alike, or the first field in which they part."""
    if not result.compared_values:
        return "nothing to compare: no event was observed on both sides"
    if result.differences:
        first = result.differences[0]
        return (
            f"they part at {_place(first)}: {first.field} is {_shown(first.left)} on the left, "
            f"{_shown(first.right)} on the right"
        )
    if result.differ:
        only = {**result.only_left, **result.only_right}
        kinds = ", ".join(f"{count} {kind}" for kind, count in only.items())
        return f"every common value agrees, but events have no counterpart: {kinds}"
    events = plural(result.compared_events, "event")
    return f"alike: {result.compared_values:,} values agree in {events}"


def print_differences(
    out: Console,
    result: Differences,
    names: Sequence[str],
    recordings: tuple[Recording, Recording],
) -> None:
    """The comparison with everything that was left out of it."""
    alike = not result.differ and result.compared_values
    out.print(plain(headline(result), style="bold green" if alike else "bold red"))
    out.print()
    out.print(Padding(_totals(result, names), (0, 0, 1, 2)))
    print_fields(out, result)
    print_outside_edits(out, result)
    changed = differing_fingerprints(*recordings)
    if changed:
        listed = ", ".join(changed[:6]) + (" ..." if len(changed) > 6 else "")
        out.print(plain(f"the source differs in {plural(len(changed), 'function')}: {listed}"))


def print_fields(out: Console, result: Differences) -> None:
    """Fields that differ, most often first, each with its first pair of values."""
    if not result.by_field:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("field", no_wrap=True)
    for heading in ("left", "right"):
        table.add_column(heading, overflow="fold")
    wide = out.width >= _WIDE
    if wide:
        table.add_column("first at", overflow="fold")
    table.add_column("times", justify="right", no_wrap=True)
    first: dict[str, Difference] = {}
    for difference in result.differences:
        first.setdefault(difference.field, difference)
    ordered = sorted(result.by_field.items(), key=lambda item: -item[1])
    for name, count in ordered[:MAX_FIELDS]:
        example = first.get(name)
        cells = ("", "", "") if example is None else _cells(example)
        table.add_row(name, *cells[: 3 if wide else 2], f"{count:,}")
    out.print(Padding(table, (0, 0, 1, 2)))
    if len(ordered) > MAX_FIELDS:
        out.print(f"  {len(ordered) - MAX_FIELDS} more fields: see --json")
        out.print()


def print_outside_edits(out: Console, result: Differences) -> None:
    """Edits by code between the hooked functions, which a replay takes as recorded."""
    if not result.outside_edits:
        return
    out.print(
        plain(f"{plural(result.outside_edits, 'outside edit')} applied as recorded", style="bold")
    )
    counted: dict[str, int] = {}
    for edit in result.outside_edit_list:
        counted[edit.field] = counted.get(edit.field, 0) + edit.count
    ordered = sorted(counted.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {count:,}" for name, count in ordered[:MAX_EDITS])
    more = f", {len(ordered) - MAX_EDITS} more fields" if len(ordered) > MAX_EDITS else ""
    out.print(Padding(plain(text + more), (0, 0, 1, 2)))


def _totals(result: Differences, names: Sequence[str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("left", names[0])
    table.add_row("right", names[1])
    events = plural(result.compared_events, "event")
    table.add_row("compared", f"{result.compared_values:,} values in {events}")
    table.add_row("different", plural(result.total, "value"))
    for reason, count in result.ignored.items():
        table.add_row("ignored", f"{count:,} values: {reason}")
    for side, counts in (("left", result.only_left), ("right", result.only_right)):
        if counts:
            text = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
            table.add_row(f"only {side}", text)
    return table


def _cells(difference: Difference) -> tuple[str, str, str]:
    return _shown(difference.left), _shown(difference.right), _place(difference)


def _shown(value: object) -> str:
    plain = json_value(value)  # type: ignore[arg-type]
    text = "None" if plain is None else str(plain)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _place(difference: Difference) -> str:
    places = (("rank", difference.rank), ("step", difference.step), ("fwd", difference.forward))
    words = [f"{name} {value}" for name, value in places if value is not None]
    return " ".join([*words, f"{difference.event} {difference.enter_seq}"])
