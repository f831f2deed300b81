"""`padtrace info`: what a recording holds, and the proof of its tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from padtrace.recording import about, coverage, schema
from padtrace.recording.model import Recording
from padtrace.recording.value_tensors import INTEGERS, tier_of
from padtrace.report.blindness import blind_spots
from padtrace.report.summary import Summary, summarize
from padtrace.report.words import plain, plural, ranks_text

MAX_SHAPE_STRING = 512
# Words that only a column of contents would carry; no column of the schema does.
_CONTENT_WORDS = ("token_ids", "text", "prompt", "logits.values", "rid")


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


@dataclass(frozen=True, slots=True)
class ShareProof:
    """What was looked at to say what a file can hold."""

    tier: str
    holds: bool
    lines: list[str]
    problems: list[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "holds": self.holds,
            "looked_at": self.lines,
            "problems": self.problems,
        }


def share_check(recording: Recording) -> ShareProof:
    """Look at everything in the file that could carry contents.

    The reader has refused columns that are no integers, and values of fields it does not know;
    what remains are the names of the columns, the strings, the JSON of facts and coverage, and
    which values of tensors there are.
    """
    tier = about.view(recording.about).tier
    columns = [column for table in schema.all_tables() for column in table.columns]
    problems: list[str] = []
    if tier != "shape":
        problems.append(f"the file says it is of tier {tier}, which holds values, not only shapes")
    contents = [c.name for c in columns if any(word in c.name for word in _CONTENT_WORDS)]
    problems += [f"column {name} could hold contents" for name in contents]
    long_strings = [text for text in recording.strings if len(text) > MAX_SHAPE_STRING]
    problems += [f"a string of {len(text)} characters is no name" for text in long_strings]
    problems += _unknown_messages(recording)
    problems += _forbidden_values(recording, tier)
    lines = [
        f"{len(columns)} columns, all integers: row counts, lengths, sizes, ranks, times, names",
        f"{len(recording.strings)} strings: names of classes, functions, modes, files",
        f"{recording.rows('vector')} lists of integers: per-rank counts, lengths, shapes",
        f"{recording.rows('error')} errors: each message a shipped template or a hash",
        f"facts of {plural(len(recording.facts), 'rank')}: server arguments, sizes, SGLANG_*"
        " variables, secrets redacted; model names are in them",
        *_values(recording),
    ]
    return ShareProof(tier, not problems, lines, problems)


def _values(recording: Recording) -> list[str]:
    """Which tensors' values the file holds, by field."""
    if not recording.values:
        return ["no values of tensors"]
    counts: dict[str, int] = {}
    for key, value in recording.values.items():
        kind = "integers" if value.dtype in INTEGERS else "activations or KV"
        name = f"{key.plain_field} ({kind})"
        counts[name] = counts.get(name, 0) + 1
    return [f"values of {plural(len(recording.values), 'tensor')}: {_counts(counts)}"]


def _forbidden_values(recording: Recording, tier: str) -> list[str]:
    """Values that a file of this tier must not hold, one line for each field."""
    allowed = {"shape": (), "meta": ("meta",), "full": ("meta", "full")}.get(tier, ())
    fields = {
        key.plain_field: needed
        for key, value in recording.values.items()
        if (needed := tier_of(key, value)) not in allowed
    }
    return [
        f"it holds values of {field}, which only tier {needed} may hold"
        for field, needed in sorted(fields.items())
    ]


def _unknown_messages(recording: Recording) -> list[str]:
    problems = []
    for row in range(recording.rows("error")):
        message = recording.event("error", row).text("message") or ""
        if "\n" in message:
            problems.append(f"the message of error {row} has several lines")
    return problems


def print_share_check(out: Console, proof: ShareProof) -> None:
    """The proof, and whether the file may go into a public issue."""
    if proof.holds:
        head = "shape: no token ids, no text, no activations; fit for a public issue"
        out.print(plain(head, style="bold green"))
    else:
        out.print(plain(f"tier {proof.tier}: look before you share", style="bold yellow"))
    for line in proof.lines:
        out.print(Padding(plain(line), (0, 0, 0, 2)))
    for problem in proof.problems:
        out.print(Padding(plain(problem, style="bold"), (0, 0, 0, 2)))
