"""`padtrace ranks`: what every rank did in one step, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from padtrace.contracts.engine import check
from padtrace.contracts.evidence import NO_ROW, Evidence, present
from padtrace.contracts.model import Report
from padtrace.contracts.sites import (
    forward_of,
    pad_sites,
    real_rows,
    unpadded_sites,
)
from padtrace.errors import NothingObservedError, UsageError
from padtrace.one_line import one_line
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.columns import Int64Array
from padtrace.recording.model import Recording
from padtrace.report.words import MAX_MODE, MAX_PADDING, plain, plural, ranks_text

# What all ranks of one forward must have in common, by the words of the table.
AGREED = {"counts": "counts", "padding": "padding_mode", "run": "run", "buffer": "buffer_rows"}


FAILED = " FAILED"
# Of a step, and of one forward; a draft of ten steps has some twenty forwards.
MAX_FORWARDS, MAX_LINES = 60, 512
RUNS = {0: "eager", 1: "graph", None: None}


@dataclass(frozen=True, slots=True)
class RankLine:
    """One forward of one rank; None is what was not observed.

    Attributes:
        position: how many forwards of this worker the rank did before in the step.
        counts: tokens per rank that the sync vector says, before spec scaling.
        run: `graph` or `eager`.
        real_rows, planned_rows, padded_rows: rows of requests, rows the plan counted, rows of q.
        buffer_rows: length of the gathered buffer.
    """

    rank: int | None
    worker: str
    position: int
    forward: int | None
    mode: str | None
    counts: tuple[int, ...] | None
    padding_mode: str | None
    run: str | None
    real_rows: int | None
    planned_rows: int | None
    padded_rows: int | None
    buffer_rows: int | None
    failed: bool

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class StepOfRanks:
    """All ranks in one step.

    Attributes:
        lines: by worker and position, then rank.
        silent: ranks of the file without a forward in this step.
        missing: ranks of the topology that the file does not hold.
    """

    step: int
    lines: list[RankLine]
    silent: list[int]
    missing: list[int]

    def groups(self) -> Iterator[tuple[tuple[str, int], list[RankLine]]]:
        """Forwards that the ranks do together: (worker, position) and its lines."""
        grouped: dict[tuple[str, int], list[RankLine]] = {}
        for line in self.lines:
            grouped.setdefault((line.worker, line.position), []).append(line)
        yield from grouped.items()

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "forwards": [
                {
                    "worker": worker,
                    "position": position,
                    "disagree": disagreements(lines),
                    "ranks": [line.as_json() for line in lines],
                }
                for (worker, position), lines in self.groups()
            ],
            "ranks_without_forward": self.silent,
            "missing_ranks": self.missing,
        }


def disagreements(lines: Sequence[RankLine]) -> list[str]:
    """What the ranks of one forward should have in common and have not."""
    found = []
    for word, name in AGREED.items():
        values = {getattr(line, name) for line in lines} - {None}
        if len(values) > 1:
            found.append(word)
    return found


def side_by_side(recording: Recording, step: int | None = None) -> StepOfRanks:
    """What every rank did in a step; without one, in the last that any rank was in.

    Raises:
        UsageError: no event of that step was recorded.
        NothingObservedError: no step was recorded at all.
    """
    evidence = Evidence(recording)
    steps = evidence.column("forward", "step")
    known = steps[present(steps)]
    hint = "`padtrace show` lists the events"
    if not known.size:
        why = "the recording holds no forward in a step"
        raise NothingObservedError("no step was recorded", why, hint)
    if step is None:
        step = int(known.max())
    if not (known == step).any():
        span = f"steps {int(known.min())} to {int(known.max())}"
        what = f"no forward of step {step} is recorded"
        raise UsageError(what, f"the recording holds {span}", hint)
    lines = _lines(evidence, np.flatnonzero(steps == step).astype(np.int64))
    ranks = _ranks(evidence)
    silent = sorted(set(ranks) - {line.rank for line in lines})
    return StepOfRanks(step, lines, silent, missing_ranks(recording))


def missing_ranks(recording: Recording) -> list[int]:
    """Ranks that the recording says are missing, or that its topology has and it does not."""
    evidence = Evidence(recording)
    found = set(evidence.coverage.blind.missing_ranks)
    # Cases name one rank each on purpose; several replicas do not say how many they are.
    replicas = evidence.column("process", "replica")
    made = any(evidence.facts(row).case for row in range(recording.rows("process")))
    if not made and (replicas == 0).all():
        tp, pp = (evidence.column("process", f"{name}_size") for name in ("tp", "pp"))
        size = max(int(tp.max(initial=0)), 0) * max(int(pp.max(initial=1)), 1)
        found |= set(range(size)) - set(_ranks(evidence))
    return sorted(found)


def _ranks(evidence: Evidence) -> list[int]:
    return sorted({int(rank) for rank in evidence.column("process", "global_rank") if rank >= 0})


def _lines(evidence: Evidence, forwards: Int64Array) -> list[RankLine]:
    columns = _columns(evidence, forwards)
    counts = _counts(evidence, forwards)
    lines: list[RankLine] = []
    seen: dict[tuple[int, str], int] = {}
    entered = evidence.column("forward", "enter_seq")[forwards]
    for index in np.lexsort((entered, columns["process"])):
        value = {name: _number(column[index]) for name, column in columns.items()}
        process = value["process"] or 0
        worker = evidence.text(int(columns["worker"][index])) or "target"
        position = seen.get((process, worker), 0)
        seen[process, worker] = position + 1
        lines.append(
            RankLine(
                rank=_number(evidence.column("process", "global_rank")[process]),
                worker=worker,
                position=position,
                forward=value["forward"],
                mode=evidence.text(int(columns["mode"][index])),
                counts=_vector(evidence, counts[index]),
                padding_mode=evidence.text(int(columns["padding"][index])),
                run=RUNS.get(value["graph"]),
                real_rows=value["real"],
                planned_rows=value["planned"],
                padded_rows=value["padded"],
                buffer_rows=value["buffer"],
                failed=value["failed"] == 1,
            )
        )
    names = dict.fromkeys(line.worker for line in lines)
    workers = {name: index for index, name in enumerate(names)}
    return sorted(lines, key=lambda x: _place(workers, x))


def _place(workers: dict[str, int], line: RankLine) -> tuple[int, int, int]:
    rank = NO_ROW if line.rank is None else line.rank
    return workers[line.worker], line.position, rank


def _columns(evidence: Evidence, forwards: Int64Array) -> dict[str, Int64Array]:
    """The columns of some forwards, from their pads and plans where they have any."""
    pads, plans = _pads_and_plans(evidence, forwards)
    own = evidence.snapshot("forward", "entry", "input_ids.rows", forwards)
    real = np.where(pads >= 0, real_rows(evidence, pads), own)
    padded = np.where(pads >= 0, evidence.snapshot("pad", "exit", "input_ids.rows", pads), own)
    mode = evidence.column("forward", "forward_mode")[forwards]
    entry = evidence.snapshot("pad", "entry", "forward_mode", pads)
    # A plan for a graph counts the bucket, one without num_splits the rows it was given.
    planned = evidence.at("plan", "planned.rows", plans)
    splits = evidence.at("plan", "num_splits.rows", plans)
    return {
        "process": evidence.column("forward", "process")[forwards],
        "worker": evidence.column("forward", "worker")[forwards],
        "forward": evidence.column("forward", "forward")[forwards],
        "mode": np.where(present(entry), entry, mode),
        "graph": evidence.column("forward", "can_run_graph")[forwards],
        "failed": evidence.column("forward", "failed")[forwards],
        "padding": evidence.snapshot("pad", "exit", "dp_padding_mode", pads),
        "real": real,
        "planned": np.where(present(splits) & ~present(planned), splits - 1, planned),
        "padded": padded,
        "buffer": evidence.snapshot("pad", "exit", "global_dp_buffer_len", pads),
    }


def _pads_and_plans(evidence: Evidence, forwards: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Row of the pad and of the plan of each forward, -1 where there is none."""
    pads = np.full(forwards.shape, NO_ROW, dtype=np.int64)
    plans = np.full(forwards.shape, NO_ROW, dtype=np.int64)
    place = {int(row): index for index, row in enumerate(forwards)}
    padded = pad_sites(evidence)
    owners = forward_of(evidence, "pad", padded.rows)
    for index, owner in enumerate(owners):
        position = place.get(int(owner))
        if position is not None:
            pads[position], plans[position] = padded.rows[index], padded.plans[index]
    bare = unpadded_sites(evidence)
    for index, row in enumerate(bare.rows):
        position = place.get(int(row))
        if position is not None and plans[position] < 0:
            plans[position] = bare.plans[index]
    return pads, plans


def _counts(evidence: Evidence, forwards: Int64Array) -> Int64Array:
    """Index of the count vector that the batch of each forward was given."""
    syncs = np.arange(evidence.count("sync"), dtype=np.int64)
    names = ("process", "batch")
    index = evidence.last_before(
        (evidence.keys("sync", syncs, *names), np.zeros_like(syncs)),
        (evidence.keys("forward", forwards, *names), np.ones_like(forwards)),
    )
    return evidence.at("sync", "counts_before", index)


def _vector(evidence: Evidence, index: np.int64) -> tuple[int, ...] | None:
    return tuple(evidence.recording.vector(int(index))) if index >= 0 else None


def _number(value: np.int64) -> int | None:
    return int(value) if value > HIGHEST_ABSENT_CODE else None


def divergent_step(report: Report) -> int | None:
    """The step of the most telling finding."""
    for group in report.groups:
        if group.first.step is not None:
            return group.first.step
    return None


def step_to_show(recording: Recording, step: int | None) -> int | None:
    """The step asked for, else the one of the first finding; None for the last there is."""
    if step is not None:
        return step
    found = divergent_step(check(recording))
    steps = recording.table("forward").column("step")
    return found if found is not None and (steps == found).any() else None


def print_divergent_step(out: Console, recording: Recording, report: Report) -> None:
    """The ranks in the step of the first finding, where there are several ranks."""
    step = divergent_step(report)
    if step is None or recording.rows("process") < 2 or not recording.rows("forward"):
        return
    steps = recording.table("forward").column("step")
    if (steps == step).any():
        print_ranks(out, side_by_side(recording, step))


def print_ranks(out: Console, result: StepOfRanks) -> None:
    """One table per forward that the ranks do together."""
    out.print(plain(f"step {result.step}, ranks side by side", style="bold"))
    groups = list(result.groups())
    for (worker, position), lines in groups[:MAX_FORWARDS]:
        _print_group(out, worker, position, lines)
    if len(groups) > MAX_FORWARDS:
        rest = plural(len(groups) - MAX_FORWARDS, "more forward")
        out.print(f"  {rest} in this step: see --json")
    if result.silent:
        out.print(f"no forward in this step: {ranks_text(result.silent)}")
    if result.missing:
        text = f"not in the file: {ranks_text(result.missing)} (merge folders: padtrace seal)"
        out.print(plain(text, style="yellow"))
    out.print()


def _print_group(out: Console, worker: str, position: int, lines: Sequence[RankLine]) -> None:
    apart = disagreements(lines)
    shared = {line.counts for line in lines if line.counts is not None}
    counts = f", counts {list(*shared)}" if len(shared) == 1 else ""
    title = f"{worker} forward {position + 1}: {plural(len(lines), 'rank')}{counts}"
    out.print(Padding(plain(title, style="dim"), (0, 0, 0, 2)))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("mode", no_wrap=True, max_width=MAX_MODE + len(FAILED))
    if "counts" in apart:
        table.add_column("counts", overflow="fold")
    table.add_column("padding", no_wrap=True, max_width=MAX_PADDING)
    table.add_column("run", no_wrap=True)
    for heading in ("real", "planned", "padded", "buffer"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines[:MAX_LINES]:
        table.add_row(*_cells(line, apart))
    out.print(Padding(table, (0, 0, 0, 4)))
    if len(lines) > MAX_LINES:
        rest = plural(len(lines) - MAX_LINES, "more rank")
        out.print(Padding(plain(f"{rest}: see --json"), (0, 0, 0, 4)))
    if apart:
        text = f"the ranks do not agree on {', '.join(apart)}"
        out.print(Padding(plain(text, style="bold red"), (0, 0, 0, 4)))


def _cells(line: RankLine, apart: Sequence[str]) -> list[str | Text]:
    def cell(value: object, word: str = "") -> Text:
        style = "bold red" if word in apart else ""
        return plain("-" if value is None else str(value), style)

    short = line.planned_rows is not None and line.planned_rows != line.padded_rows
    counts = [cell(list(line.counts) if line.counts else None, "counts")]
    # The mark stays where a long name is cut.
    mode = one_line(line.mode or "-", MAX_MODE) + (FAILED if line.failed else "")
    return [
        cell(line.rank),
        mode,
        *(counts if "counts" in apart else []),
        cell(line.padding_mode, "padding"),
        cell(line.run, "run"),
        cell(line.real_rows),
        plain(cell(line.planned_rows).plain, style="bold red" if short else ""),
        cell(line.padded_rows),
        cell(line.buffer_rows, "buffer"),
    ]
