"""`padtrace info --share-check` and `padtrace redact`: what a stranger could read in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding

from padtrace.report.words import plain, plural
from padtrace.sharing.check import ShareProof, Suspicion
from padtrace.sharing.document import Redacted
from padtrace.sharing.kept import LIST_VERSION


def print_share_check(out: Console, proof: ShareProof, path: str = "REC") -> None:
    """The proof, and whether the file may go into a public issue."""
    if proof.holds:
        head = "shape: no token ids, no text, no activations; fit for a public issue"
        out.print(plain(head, style="bold green"))
    elif proof.tier == "shape":
        out.print(plain("it holds what a stranger should not read", style="bold yellow"))
    else:
        tier = proof.tier if proof.tier in ("meta", "full") else "unknown"
        out.print(plain(f"tier {tier}: look before you share", style="bold yellow"))
    for line in proof.lines:
        _line(out, line)
    for place, count in proof.free_texts.items():
        _line(out, f"texts at {place}: {count:,}")
    for problem in proof.problems:
        _line(out, problem, "bold")
    for suspicion in proof.suspicions:
        _line(out, _suspicion(suspicion), "bold")
    if proof.holds_more:
        _line(out, _holds_more(proof), "bold")
    if not proof.holds:
        out.print(plain(f"next: padtrace redact {path} -o OUT", style="dim"), soft_wrap=True)


def print_redacted(
    out: Console, redacted: Redacted, proof: ShareProof, path: Path, size: int
) -> None:
    """What was written, and what is no longer in it."""
    out.print(plain(f"{path}: {size:,} bytes, for a public issue"), soft_wrap=True)
    if not redacted.taken:
        _line(out, "nothing had to be taken out")
    for what, count in redacted.taken.items():
        _line(out, f"taken out: {what}, {count:,}")
    for problem in proof.problems:
        _line(out, problem, "bold")
    out.print(plain(f"next: padtrace info {path} --share-check", style="dim"), soft_wrap=True)


def redacted_as_json(
    redacted: Redacted, proof: ShareProof, path: Path, size: int
) -> dict[str, Any]:
    """The same for programs."""
    return {
        "recording": str(path),
        "bytes": size,
        "taken_out": redacted.taken,
        "holds": proof.holds,
    }


def _line(out: Console, line: str, style: str = "") -> None:
    out.print(Padding(plain(line, style=style), (0, 0, 0, 2)))


def _suspicion(one: Suspicion) -> str:
    times = f", {one.count:,} times" if one.count > 1 else ""
    return f"{one.place}: {one.why}: {one.masked}{times}"


def _holds_more(proof: ShareProof) -> str:
    what = ", ".join(f"{name} {count:,}" for name, count in proof.holds_more.items())
    version = proof.list_version
    if version is None or version < LIST_VERSION:
        return f"made by an older padtrace that held more: {what}"
    if version > LIST_VERSION:
        return f"made by a newer padtrace with another list, {version}: {what}"
    return f"{plural(sum(proof.holds_more.values()), 'text')} that no list keeps: {what}"
