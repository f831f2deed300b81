"""Which differences in rows a backend puts up with: data, one entry per backend and field."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from padtrace.contracts.model import BoolArray
from padtrace.contracts.releases import in_range
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.columns import Int64Array

_FUSE_TOPK = ("SGLANG_DSA_FUSE_TOPK", "SGLANG_NSA_FUSE_TOPK")
_OFF = ("false", "0", "no", "n")

if TYPE_CHECKING:
    from padtrace.contracts.evidence import Evidence


class Tolerance(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One declared tolerance; it holds where every condition it states is known to hold.

    Attributes:
        field: the column it is about, as findings name it.
        backends: attention backends by class; empty where the reason is in no backend.
        sign: shorter or longer.
        modes, workers: forward modes and workers; empty for all.
        devices: device types; empty for all.
        fused_topk: whether the DSA top-k must be fused with its transform (SGLANG_DSA_FUSE_TOPK,
            SGLANG_NSA_FUSE_TOPK before; on unless switched off).
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
    devices: list[str] = []
    fused_topk: bool = False
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
        process, modes, workers, backends: per violation; string ids but for the first. A backend
            that no plan shows is the one that the facts of the worker name.
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
            stated = _stated_backend(evidence, entry, process, workers)
            unknown = backends <= HIGHEST_ABSENT_CODE
            fits &= np.where(unknown, stated, evidence.is_text(backends, *entry.backends))
        fits &= _holds(evidence, entry)[process]
        declaring[fits & (declaring < 0)] = number
    return declaring


def _stated_backend(
    evidence: Evidence, entry: Tolerance, process: Int64Array, workers: Int64Array
) -> BoolArray:
    """Where no plan shows the backend: whether the facts of the worker name one of the entry's."""
    stated = np.zeros(process.shape, dtype=np.bool_)
    for number in range(evidence.count("process")):
        for worker, facts in evidence.facts(number).workers.items():
            if facts.backend in entry.backends:
                stated |= (process == number) & (workers == evidence.text_id(worker))
    return stated


def _holds(evidence: Evidence, entry: Tolerance) -> BoolArray:
    """For each process, whether its device, release and top-k are known to be the entry's."""
    holds = np.ones(evidence.count("process"), dtype=np.bool_)
    for process in range(holds.size):
        device = evidence.facts(process).device.type
        holds[process] = (
            (not entry.devices or device in entry.devices)
            and (not entry.fused_topk or _fused_topk(evidence, process))
            and _of_release(evidence.release(process), entry)
        )
    return holds


def _of_release(release: str | None, entry: Tolerance) -> bool:
    first, last = entry.first_release, entry.last_release
    return (not first and not last) or in_range(release, first, last, unknown=False)


def _fused_topk(evidence: Evidence, process: int) -> bool:
    """Whether the DSA top-k is known to be fused: False where the environment was not recorded."""
    raw, facts = evidence.recording.facts[process], evidence.facts(process)
    if "environment" not in raw or facts.server_args.get("enable_hisparse"):
        return False
    switches = [facts.environment.get(name) for name in _FUSE_TOPK]
    return not any(value is not None and value.lower() in _OFF for value in switches)
