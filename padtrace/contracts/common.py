"""Steps that most contracts share: find what breaks a rule, ask the tolerances, keep the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from padtrace.contracts import tolerances
from padtrace.contracts.evidence import NO_ROW, Evidence, present
from padtrace.contracts.model import BoolArray, Evaluation, Severity, Violations
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.columns import Int64Array

NOT_SEEN = "what it compares was not observed"


@dataclass(frozen=True, slots=True)
class Side:
    """One column of numbers under its name."""

    name: str
    values: Int64Array


@dataclass(frozen=True, slots=True)
class Place:
    """Where numbers were seen: rows of an event table, with what belongs to them."""

    kind: str
    rows: Int64Array
    modes: Int64Array | None = None
    plans: Int64Array | None = None
    pads: Int64Array | None = None

    def select(self, mask: BoolArray) -> Place:
        def part(values: Int64Array | None) -> Int64Array | None:
            return None if values is None else values[mask]

        return Place(
            self.kind, self.rows[mask], part(self.modes), part(self.plans), part(self.pads)
        )


def hold(
    evidence: Evidence,
    result: Evaluation,
    place: Place,
    left: Side,
    right: Side,
    *,
    expected: Int64Array | None = None,
    broken: BoolArray | None = None,
    harmless: BoolArray | None = None,
    outcome: str = "",
    severity: Severity | None = None,
) -> None:
    """Evaluate `right == expected` at every place where both sides were seen.

    Args:
        expected: what the right side must be; the left side where None.
        broken: another way to be broken than being unequal.
        harmless: where a declared tolerance of this field may apply at all.
        outcome, severity: of what is not tolerated.
    """
    wanted = left.values if expected is None else expected
    known = present(left.values) & present(right.values) & present(wanted)
    result.evaluated += int(known.sum())
    result.skip(NOT_SEEN, int((~known).sum()))
    wrong = known & ((right.values != wanted) if broken is None else broken)
    if not wrong.any():
        return
    chosen = place.select(wrong)
    tolerated = tolerances.declared(
        evidence,
        right.name,
        process=evidence.column(place.kind, "process")[chosen.rows],
        sign=np.sign(right.values[wrong] - wanted[wrong]),
        modes=chosen.modes if chosen.modes is not None else _no_text(chosen.rows),
        workers=evidence.column(place.kind, "worker")[chosen.rows],
        backends=backends_of(evidence, chosen),
    )
    if harmless is not None:
        tolerated[~harmless[wrong]] = -1
    for declared in (False, True):
        part = (tolerated >= 0) == declared
        if part.any():
            kept = chosen.select(part)
            result.violations.append(
                Violations(
                    event_kind=kept.kind,
                    rows=kept.rows,
                    left_name=left.name,
                    left=left.values[wrong][part],
                    right_name=right.name,
                    right=right.values[wrong][part],
                    expected=wanted[wrong][part],
                    plans=kept.plans,
                    pads=kept.pads,
                    modes=kept.modes,
                    tolerated=tolerated[part],
                    severity=severity,
                    outcome="" if declared else outcome,
                )
            )


def backends_of(evidence: Evidence, place: Place) -> Int64Array:
    """String id of the attention backend at each place: of its plan, else of its worker."""
    plans = _no_text(place.rows) if place.plans is None else place.plans
    backends = evidence.at("plan", "backend", plans)
    workers = evidence.column(place.kind, "worker")[place.rows]
    processes = evidence.column(place.kind, "process")[place.rows]
    stated = np.full(place.rows.shape, NO_ROW, dtype=np.int64)
    for process in np.unique(processes):
        for worker, facts in evidence.facts(int(process)).workers.items():
            fits = (processes == process) & (workers == evidence.text_id(worker))
            stated[fits] = evidence.text_id(facts.backend or "")
    return np.where(backends > HIGHEST_ABSENT_CODE, backends, stated)


def rows_of(evidence: Evidence, kind: str) -> Int64Array:
    return np.arange(evidence.count(kind), dtype=np.int64)


def pad_place(evidence: Evidence, plans: Int64Array | None = None) -> Place:
    """The pads of whole forwards, with the mode they were met in."""
    pads = evidence.top_pads
    modes = evidence.snapshot("pad", "entry", "forward_mode", pads)
    return Place("pad", pads, modes, plans, pads)


def _no_text(rows: Int64Array) -> Int64Array:
    return np.full(rows.shape, NO_ROW, dtype=np.int64)
