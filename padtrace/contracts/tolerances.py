"""Which differences in rows a backend puts up with: data, one entry per backend and field."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from padtrace.contracts.model import BoolArray
from padtrace.contracts.releases import in_range
from padtrace.recording.columns import Int64Array

if TYPE_CHECKING:
    from padtrace.contracts.evidence import Evidence


class Tolerance(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One declared tolerance.

    Attributes:
        field: the column it is about, as findings name it.
        backends: attention backends by class; empty for all.
        sign: shorter or longer.
        modes, workers: forward modes and workers; empty for all.
        not_on: device types where it does not hold.
        first_release, last_release: SGLang releases it holds for, both included.
        why: what takes care of the difference.
        source: where that can be read.
    """

    field: str
    why: str
    source: str
    backends: list[str] = []
    sign: str | None = None
    modes: list[str] = []
    workers: list[str] = []
    not_on: list[str] = []
    first_release: str | None = None
    last_release: str | None = None


@cache
def table() -> tuple[Tolerance, ...]:
    """The shipped table."""
    text = resources.files("padtrace.contracts").joinpath("tolerances.json").read_bytes()
    return tuple(msgspec.json.decode(text, type=list[Tolerance]))


def declared(
    evidence: Evidence,
    field: str,
    *,
    process: Int64Array,
    sign: Int64Array,
    modes: Int64Array,
    workers: Int64Array,
    backends: Int64Array,
) -> Int64Array:
    """Which entry of the table declares a difference of `field` harmless, -1 where none does.

    Args:
        process, modes, workers, backends: per violation; string ids but for the first.
        sign: negative where the field is shorter than it must be.
    """
    declaring = np.full(process.shape, -1, dtype=np.int64)
    for number, entry in enumerate(table()):
        if entry.field != field:
            continue
        fits = np.ones(process.shape, dtype=np.bool_)
        if entry.sign:
            fits &= (sign < 0) == (entry.sign == "shorter")
        if entry.modes:
            fits &= evidence.is_text(modes, *entry.modes)
        if entry.workers:
            fits &= evidence.is_text(workers, *entry.workers)
        if entry.backends:
            fits &= evidence.is_text(backends, *entry.backends)
        if entry.not_on or entry.first_release or entry.last_release:
            fits &= _holds(evidence, entry)[process]
        declaring[fits & (declaring < 0)] = number
    return declaring


def _holds(evidence: Evidence, entry: Tolerance) -> BoolArray:
    """For each process, whether its device and release are ones the entry speaks of."""
    holds = np.ones(evidence.count("process"), dtype=np.bool_)
    for process in range(holds.size):
        facts = evidence.facts(process)
        release = evidence.release(process)
        holds[process] = facts.device.type not in entry.not_on and in_range(
            release, entry.first_release, entry.last_release
        )
    return holds
