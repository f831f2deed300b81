"""`padtrace explain`: the page of a contract, or the list of them."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from padtrace.contracts.catalogue import CONTRACTS
from padtrace.contracts.model import Contract
from padtrace.errors import UsageError
from padtrace.report import json_output
from padtrace.report.words import plain

_INTRODUCTION = """
A contract is one rule that the events of a recording keep or break. Its id is stable; the hundreds
are the kind (1: T1 and T2, 3: T3 ... 12: T12). Severities: `crash`, something stops; `silent`,
nothing stops and the result may be wrong; `suspect`, no harm known: suspects alone exit with 0, and
with 1 under `--strict`.

Some differences are on the path of every healthy server, for instance a page table shorter than q
where uneven ranks are padded, or `out_cache_loc` that no release restores after a forward. Which of
them a backend puts up with, in which mode and release, is declared in
`padtrace/contracts/tolerances.json`, each with its reason, its source and its conditions: backend,
mode, worker, device, release, fused top-k. What is not known fulfils no condition. They are told
under "declared harmless" and in `--json` under `tolerated`, and are no findings; `--strict` makes
them suspects that count.

This page is generated from the code: `make docs`.
"""


def print_contracts(out: Console, name: str | None, *, json: bool) -> None:
    """One contract by id, or all of them in a table.

    Raises:
        UsageError: there is no contract of that id.
    """
    if name is None:
        if json:
            out.file.write(json_output.text([_object(c) for c in CONTRACTS.values()]) + "\n")
        else:
            _print_list(out)
        return
    contract = CONTRACTS.get(name.strip().upper())
    if contract is None:
        raise UsageError(
            f"there is no contract {name}",
            f"known are {', '.join(CONTRACTS)}",
            "`padtrace explain` lists them with their rules",
        )
    if json:
        out.file.write(json_output.text(_object(contract)) + "\n")
    else:
        _print_page(out, contract)


def markdown() -> str:
    """All pages as one document: `docs/contracts.md` is this text."""
    parts = ["# Contracts", "", _INTRODUCTION.strip(), ""]
    parts += ["| id | name | severity | kind | rule |", "| --- | --- | --- | --- | --- |"]
    for contract in CONTRACTS.values():
        cells = (contract.id, contract.name, contract.severity.value, ", ".join(contract.kinds))
        parts.append(f"| {' | '.join(cells)} | {contract.rule} |")
    parts.append("")
    for contract in CONTRACTS.values():
        parts += [f"## {contract.id} {contract.name}", ""]
        parts += [f"*{contract.severity.value}; {', '.join(contract.kinds)}.* {contract.rule}.", ""]
        parts += [contract.page.strip(), ""]
    return "\n".join(parts)


def _print_list(out: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("id", "severity", "kind", "rule"):
        table.add_column(heading, overflow="fold")
    for contract in CONTRACTS.values():
        kinds = " ".join(contract.kinds)
        table.add_row(contract.id, contract.severity.value, kinds, contract.rule)
    out.print(table)


def _print_page(out: Console, contract: Contract) -> None:
    out.print(plain(f"{contract.id} {contract.name}: {contract.rule}", style="bold"))
    out.print(f"severity {contract.severity.value}, kind {', '.join(contract.kinds)}")
    out.print()
    for paragraph in contract.page.strip().split("\n\n"):
        lines = paragraph.splitlines()
        if any(line.startswith("    ") for line in lines):
            for line in lines:
                out.print(Padding(plain(line.strip(), limit=None), (0, 0, 0, 4)))
        else:
            out.print(plain(" ".join(lines), limit=None))
        out.print()


def _object(contract: Contract) -> dict[str, Any]:
    return {
        "id": contract.id,
        "name": contract.name,
        "severity": contract.severity.value,
        "kinds": list(contract.kinds),
        "rule": contract.rule,
        "page": contract.page.strip(),
    }
