"""`padtrace info`: what a recording holds."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from padtrace.recording import about, coverage, schema
from padtrace.recording.model import Recording
from padtrace.report.blindness import blind_spots
from padtrace.report.summary import Summary, summarize
from padtrace.report.words import plain, plural, ranks_text


def as_json(recording: Recording, path: str) -> dict[str, Any]:
    """Everything `info` shows, as one object."""
    return {
        "format": f"{schema.FORMAT_NAME}/{schema.FORMAT_VERSION}",
        "path": path,
        "about": recording.about,
        **summarize(recording).as_json(),
        "coverage": recording.coverage,
    }


def print_info(out: Console, recording: Recording, path: str) -> None:
    """A page that fits a screen."""
    seen = summarize(recording)
    out.print(plain(_headline(seen, path), style="bold"))
    out.print()
    out.print(Padding(_body(recording, seen), (0, 0, 1, 2)))
    lines = blind_spots(recording)
    if lines:
        out.print(plain("not seen", style="bold yellow"))
        for line in lines:
            out.print(Padding(plain(line), (0, 0, 0, 2)))
        out.print()
    action = "replay" if seen.source == "made" else "diff"
    out.print(plain(f"next: padtrace {action} {path}", style="dim"), soft_wrap=True)


def _headline(seen: Summary, path: str) -> str:
    release = ", ".join(seen.releases) or "no release named"
    what = {"server": "recorded from a server", "made": "made from a configuration"}
    source = what.get(seen.source, seen.source)
    forwards = plural(seen.events["forward"], "forward")
    return f"{path}: {source}, SGLang {release}, {forwards} on {plural(len(seen.ranks), 'rank')}"


def _body(recording: Recording, seen: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    stated = about.view(recording.about)
    table.add_row("release", ", ".join(seen.releases) or "none named")
    if seen.commits:
        table.add_row("commit", ", ".join(seen.commits))
    if stated.command:
        table.add_row("command", stated.command)
    table.add_row("tier", seen.tier)
    for topology, count in seen.topologies.items():
        table.add_row("topology", f"{topology} ({plural(count, 'rank')})")
    table.add_row("ranks", ranks_text(seen.ranks) if seen.ranks else "unknown")
    if seen.steps:
        table.add_row("steps", f"{seen.steps:,} ({seen.first_step} to {seen.last_step})")
    table.add_row("events", _counts(seen.events))
    table.add_row("forwards", _counts(seen.modes) or "none")
    if seen.in_graph:
        table.add_row("in graphs", f"{seen.in_graph:,} forwards")
    if seen.failed:
        table.add_row("failed", f"{seen.failed:,} forwards ended in an exception")
    if seen.incomplete:
        table.add_row("cut short", f"{plural(seen.incomplete, 'rank')} ended without closing")
    table.add_row("hooks", _hooks(recording))
    table.add_row("sources", f"{plural(len(seen.fingerprints), 'fingerprint')} of functions")
    for note in stated.notes or ():
        table.add_row("note", note)
    return table


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


def _hooks(recording: Recording) -> str:
    statuses: dict[str, int] = {}
    for hook in coverage.view(recording.coverage).hooks.values():
        statuses[hook.status] = statuses.get(hook.status, 0) + 1
    return _counts(statuses) or "none stated"
