"""`padtrace doctor`: the functions padtrace needs and what serves each in an SGLang."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from padtrace.errors import EXIT_CLEAN, EXIT_ENVIRONMENT
from padtrace.report import json_output


def print_capabilities(out: Console, found: Any, *, json: bool) -> int:
    """The table; returns the exit code: 4 where a capability is missing.

    Args:
        found: object with `version`, `root` and `capabilities` (name to what serves it, or None).
    """
    missing = [name for name, server in found.capabilities.items() if server is None]
    if json:
        out.file.write(
            json_output.text(
                {
                    "sglang": {"version": found.version, "source": found.root},
                    "capabilities": found.capabilities,
                    "missing": missing,
                }
            )
            + "\n"
        )
        return EXIT_ENVIRONMENT if missing else EXIT_CLEAN
    if missing:
        head = f"SGLang {found.version} lacks {', '.join(missing)}"
    else:
        head = f"SGLang {found.version} has every function that padtrace needs"
    out.print(Text(head, style="bold red" if missing else "bold green"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("capability", "served by"):
        table.add_column(heading, overflow="fold")
    for name, server in found.capabilities.items():
        table.add_row(name, server or Text("missing", style="bold red"))
    out.print(table)
    return EXIT_ENVIRONMENT if missing else EXIT_CLEAN
