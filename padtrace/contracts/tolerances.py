"""Which differences in rows a backend puts up with: data, one entry per backend and field."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from padtrace.contracts.model import BoolArray
from padtrace.recording.columns import Int64Array

if TYPE_CHECKING:
    from padtrace.contracts.evidence import Evidence
    from padtrace.contracts.model import Finding


class Tolerance(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One declared tolerance.

    Attributes:
        field: the column it is about, as findings name it.
        backends: attention backends by class; empty for all.
        sign: shorter or longer.
        modes: forward modes; empty for all.
        not_on: device types where it does not hold.
        why: what takes care of the difference.
        source: where that can be read.
    """

    field: str
    why: str
    source: str
    backends: list[str] = []
    sign: str | None = None
    modes: list[str] = []
    not_on: list[str] = []


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
    backends: Int64Array,
) -> BoolArray:
    """Where a difference of `field` is declared harmless.

    Args:
        process, modes, backends: per violation; string ids for the last two.
        sign: negative where the field is shorter than it must be.
    """
    allowed = np.zeros(process.shape, dtype=np.bool_)
    for entry in (entry for entry in table() if entry.field == field):
        fits = np.ones(process.shape, dtype=np.bool_)
        if entry.sign:
            fits &= (sign < 0) == (entry.sign == "shorter")
        if entry.modes:
            fits &= evidence.is_text(modes, *entry.modes)
        if entry.backends:
            fits &= evidence.is_text(backends, *entry.backends)
        if entry.not_on:
            fits &= ~_on(evidence, entry.not_on)[process]
        allowed |= fits
    return allowed


def _on(evidence: Evidence, devices: list[str]) -> BoolArray:
    kinds = [evidence.facts(p).device.type in devices for p in range(evidence.count("process"))]
    return np.array(kinds, dtype=np.bool_)


def reason(evidence: Evidence, finding: Finding) -> str:
    """Why the difference of a tolerated finding does no harm."""
    backend = None
    if finding.plan_row >= 0:
        backend = evidence.text(int(evidence.column("plan", "backend")[finding.plan_row]))
    for entry in table():
        if (
            entry.field == finding.right.name
            and entry.sign in (None, finding.sign)
            and (not entry.modes or finding.mode in entry.modes)
            and (not entry.backends or backend in entry.backends)
        ):
            return entry.why
    return "declared harmless"
