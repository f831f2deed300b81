"""`padtrace show`: the events of a recording in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from padtrace.errors import UsageError
from padtrace.recording import schema
from padtrace.recording.model import Event, Recording, Snapshot, json_value
from padtrace.report import json_output
from padtrace.report.words import plain, plural

Chosen = list[tuple[str, int]]


def select(
    recording: Recording,
    *,
    step: int | None = None,
    rank: int | None = None,
    forward: int | None = None,
    kind: str | None = None,
) -> Chosen:
    """(kind, row) of the events asked for, by process and order of entry.

    Raises:
        UsageError: the kind or the rank does not exist.
    """
    if kind is not None and kind not in schema.EVENT_TABLES:
        raise UsageError(
            f"there is no kind of event {kind!r}",
            f"kinds are {', '.join(schema.EVENT_KINDS)}",
            "choose one of them",
        )
    processes = _processes(recording, rank)
    kinds = schema.EVENT_KINDS if kind is None else (kind,)
    parts: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    for index, name in enumerate(kinds):
        table = recording.table(name)
        wanted = np.isin(table.column("process"), processes)
        for column, value in (("step", step), ("forward", forward)):
            if value is not None:
                wanted &= table.column(column) == value
        rows = np.flatnonzero(wanted)
        columns = (table.column("process")[rows], table.column("enter_seq")[rows])
        parts.append(np.stack([np.full(rows.size, index), rows, *columns]))
    merged = np.concatenate(parts, axis=1)
    order = np.lexsort((merged[3], merged[2]))
    return [(kinds[int(merged[0, i])], int(merged[1, i])) for i in order]


def _processes(recording: Recording, rank: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    ranks = recording.table("process").column("global_rank")
    if rank is None:
        return np.arange(ranks.size)
    found = np.flatnonzero(ranks == rank)
    if not found.size:
        listed = ", ".join(str(int(r)) for r in np.unique(ranks[ranks >= 0])) or "none"
        raise UsageError(
            f"there is no rank {rank} in this recording", f"it holds {listed}", "choose one of them"
        )
    return found


def json_lines(recording: Recording, chosen: Chosen) -> Iterator[str]:
    """One JSON object per event: its kind under "event", then every column by its name."""
    for kind, row in chosen:
        event = recording.event(kind, row)
        values = {name: json_value(value) for name, value in event.values.items()}
        yield json_output.line({"event": kind, **values})


def print_events(out: Console, recording: Recording, chosen: Chosen, *, limit: int) -> None:
    """A table with one line per event; nested events are indented."""
    shown = chosen[:limit] if limit else chosen
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    for heading in ("rank", "step", "fwd", "seq"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("event", no_wrap=True)
    table.add_column("what", overflow="fold")
    depths: dict[tuple[int | None, int | None], int] = {}
    for kind, row in shown:
        event = recording.event(kind, row)
        depth = _depth(event, depths)
        table.add_row(*_place(recording, event), "  " * min(depth, 4) + kind, _what(event))
    out.print(table)
    if len(shown) < len(chosen):
        rest = plural(len(chosen) - len(shown), "more event")
        out.print(plain(f"{rest}: narrow it with --step, --rank, --forward, --kind, or --limit 0"))
    elif not chosen:
        out.print("no event fits")


def _depth(event: Event, depths: dict[tuple[int | None, int | None], int]) -> int:
    process = event.integer("process")
    depth = depths.get((process, event.integer("parent")), -1) + 1
    depths[(process, event.integer("enter_seq"))] = depth
    return depth


def _place(recording: Recording, event: Event) -> tuple[str, str, str, str]:
    process = event.integer("process") or 0
    rank = recording.process(process).get("global_rank")
    values = (rank, event.integer("step"), event.integer("forward"), event.integer("enter_seq"))
    words = ["-" if not isinstance(value, int) else str(value) for value in values]
    return words[0], words[1], words[2], words[3]


def _what(event: Event) -> str:
    worker = event.text("worker")
    told = _TELLERS[event.kind](event)
    return " ".join(part for part in (worker, told) if part)


def _number(event: Event, *names: str) -> str:
    parts = []
    for name in names:
        value = event.integer(name)
        if value is not None:
            parts.append(f"{name.removesuffix('.rows')} {value}")
    return ", ".join(parts)


def _rows(snapshot: Snapshot | None) -> str:
    if snapshot is None:
        return ""
    words = [str(snapshot.get("forward_mode") or "")]
    for label, name in (("bs", "batch_size"), ("rows", "input_ids.rows")):
        if isinstance(snapshot.get(name), int):
            words.append(f"{label} {snapshot[name]}")
    return " ".join(word for word in words if word)


def _change(event: Event) -> str:
    before, after = event.snapshot("entry"), event.snapshot("exit")
    parts = [_rows(before)]
    if after is not None:
        mode = after.get("dp_padding_mode")
        parts.append(f"-> {_rows(after)}" + (f" ({mode})" if isinstance(mode, str) else ""))
    return " ".join(part for part in parts if part)


def _forward(event: Event) -> str:
    where = {1: "graph", 0: "eager"}.get(event.integer("can_run_graph") or 0, "")
    known = where if event.integer("can_run_graph") is not None else ""
    failed = "FAILED" if event.integer("failed") else ""
    told = _rows(event.snapshot("entry")) or event.text("forward_mode") or ""
    return " ".join(part for part in (told, known, failed) if part)


def _sync(event: Event) -> str:
    before, after = event.vector("counts_before"), event.vector("counts_after")
    return f"{before} -> {after}" if after is not None else f"{before}"


def _plan(event: Event) -> str:
    numbers = _number(event, "planned.rows", "num_splits.rows", "page_table_1.rows", "graph_bucket")
    parts = (event.text("function"), _rows(event.snapshot("entry")), numbers)
    return " ".join(part for part in parts if part)


def _launch(event: Event) -> str:
    shape = event.vector("q.shape")
    q_rows = f"q {shape[0]}" if shape else ""
    numbers = _number(event, "num_splits.rows", "cache_seqlens.rows", "count")
    failed = "FAILED" if event.integer("failed") else ""
    parts = (event.text("function"), ", ".join(p for p in (q_rows, numbers) if p), failed)
    return " ".join(part for part in parts if part)


def _graph(event: Event) -> str:
    numbers = _number(event, "raw_bs", "num_tokens_per_bs", "bucket_argument", "bucket", "verdict")
    parts = (event.text("runner"), event.text("function"), numbers)
    return " ".join(part for part in parts if part)


def _unpad(event: Event) -> str:
    before, after = event.integer("logits_before.rows"), event.integer("logits_after.rows")
    logits = "" if before is None else f"logits {before} -> {after}"
    return " ".join(part for part in (_change(event), logits) if part)


_TELLERS: dict[str, Callable[[Event], str]] = {
    "forward": _forward,
    "batch": lambda event: f"{event.text('function') or ''} {_rows(event.snapshot('exit'))}",
    "sync": _sync,
    "plan": _plan,
    "ready": lambda event: _number(event, "planned_bs", "planned_num_tokens", "replan_equivalent"),
    "pad": lambda event: f"{event.text('function') or ''} {_change(event)}",
    "graph": _graph,
    "launch": _launch,
    "unpad": _unpad,
    "error": lambda event: (
        f"{event.text('function')}: {event.text('type')}: {event.text('message')}"
    ),
}
