"""`padtrace releases` for people and programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from padtrace.report import json_output


def print_releases(out: Console, listed: Iterable[Any], *, json: bool) -> None:
    """One line per release.

    Args:
        listed: objects with `version`, `cached`, `path`, `size` (bytes, None if not here) and
            `unverified` (why its wheel was held against no hash of the index, or "").
    """
    entries = [
        {
            "version": release.version,
            "cached": release.cached,
            "path": str(release.path) if release.path else None,
            "size": release.size,
            "unverified": release.unverified or None,
        }
        for release in listed
    ]
    if json:
        out.file.write(json_output.text(entries) + "\n")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("release", "here", "where"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        size = entry["size"]
        here = f"{size / 1e6:.0f} MB" if size else "yes" if entry["cached"] else "no"
        here += ", unverified" if entry["unverified"] else ""
        table.add_row(str(entry["version"]), here, entry["path"] or "padtrace releases fetch")
    out.print(table)
