"""`padtrace doctor`: what padtrace finds in an SGLang, for recording and for replaying."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from padtrace.errors import EXIT_CLEAN, EXIT_ENVIRONMENT
from padtrace.report import json_output
from padtrace.report.words import plain

_STYLE = {"found": "green", "moved": "yellow", "absent": "red"}


def print_doctor(
    out: Console, found: Any, hooks: Sequence[Any], why_not_compiled: str, *, json: bool
) -> int:
    """Both tables; returns the exit code: 4 where a capability of the replay is missing.

    Args:
        found: object with `version`, `root` and `capabilities` (name to what serves it, or None).
        hooks: rows with `hook`, `status` (found, moved, absent), `target` and `cost`.
        why_not_compiled: why the recorder is plain Python here; "" where it is compiled.
    """
    missing = [name for name, server in found.capabilities.items() if server is None]
    if json:
        told = {
            "sglang": {"version": found.version, "source": found.root},
            "hooks": [dataclasses.asdict(row) for row in hooks],
            "recorder": {"compiled": not why_not_compiled, "why_not": why_not_compiled or None},
            "capabilities": found.capabilities,
            "missing": missing,
        }
        out.file.write(json_output.text(told) + "\n")
        return EXIT_ENVIRONMENT if missing else EXIT_CLEAN
    _print_hooks(out, found.version, hooks)
    compiled = f"plain Python, since {why_not_compiled}" if why_not_compiled else "compiled"
    out.print(plain(f"the recorder of this interpreter is {compiled}"))
    out.print()
    _print_capabilities(out, found, missing)
    return EXIT_ENVIRONMENT if missing else EXIT_CLEAN


def _print_hooks(out: Console, version: str, hooks: Sequence[Any]) -> None:
    there = sum(row.status != "absent" for row in hooks)
    head = f"record: {there} of {len(hooks)} functions are in SGLang {version}"
    out.print(plain(head, style="bold"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("hook", overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("where, or what a recording cannot say without it", overflow="fold")
    for row in hooks:
        told = row.cost if row.status == "absent" else row.target.removeprefix("sglang.srt.")
        table.add_row(row.hook, plain(row.status, style=_STYLE[row.status]), told)
    out.print(table)
    if any(row.status == "absent" and row.outside for row in hooks):
        line = "kernel packages are looked for in this interpreter; run doctor beside the server"
        out.print(plain(line, style="dim"))


def _print_capabilities(out: Console, found: Any, missing: list[str]) -> None:
    if missing:
        head = f"replay: SGLang {found.version} lacks {', '.join(missing)}"
    else:
        head = f"replay: SGLang {found.version} has every function that padtrace needs"
    out.print(plain(head, style="bold red" if missing else "bold green"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("capability", "served by"):
        table.add_column(heading, overflow="fold")
    for name, server in found.capabilities.items():
        table.add_row(name, server or plain("missing", style="bold red"))
    out.print(table)
