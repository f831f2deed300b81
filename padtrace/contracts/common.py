"""Steps that most contracts share: find what breaks a rule, ask the tolerances, keep the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padtrace.contracts import tolerances
from padtrace.contracts.evidence import NO_ROW, Evidence, present
from padtrace.contracts.model import BoolArray, Evaluation, Severity, Violations
from padtrace.contracts.sites import NO_BOUND
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
    from_none: BoolArray | None = None,
    harmless: BoolArray | None = None,
    outcome: str = "",
    texts: Sequence[str] | None = None,
    severity: Severity | None = None,
) -> None:
    """Evaluate `right == expected` at every place where both sides were seen.

    Args:
        expected: what the right side must be; the left side where None.
        broken: another way to be broken than being unequal.
        from_none: where the left side must be None and was, and the right side is a number.
        harmless: where a declared tolerance of this field may apply at all.
        texts: what the sides are numbers of, where they are no numbers themselves.
        outcome, severity: of what is not tolerated.
    """
    wanted = left.values if expected is None else expected
    known = present(left.values) & present(right.values) & present(wanted)
    wrong = known & ((right.values != wanted) if broken is None else broken)
    if from_none is not None:
        wrong |= from_none
        known = known | from_none
    result.evaluated += int(known.sum())
    result.skip(NOT_SEEN, int((~known).sum()))
    if not wrong.any():
        return
    chosen = place.select(wrong)
    tolerated = tolerances.declared(
        evidence,
        right.name,
        process=evidence.column(place.kind, "process")[chosen.rows],
        sign=_sign(right.values[wrong], wanted[wrong]),
        modes=chosen.modes if chosen.modes is not None else _no_text(chosen.rows),
        workers=evidence.column(place.kind, "worker")[chosen.rows],
        backends=_backends_of(evidence, chosen),
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
                    texts=texts,
                )
            )


def _sign(values: Int64Array, wanted: Int64Array) -> Int64Array:
    """Negative where too short; a number where None was wanted is too long."""
    known = present(wanted)
    return np.where(known, np.sign(values - np.where(known, wanted, 0)), 1)


def _backends_of(evidence: Evidence, place: Place) -> Int64Array:
    """String id of the attention backend at each place: of its plan, else of its batch's last."""
    if place.plans is not None:
        return evidence.at("plan", "backend", place.plans)
    end = np.full(place.rows.shape, NO_BOUND, dtype=np.int64)
    plans = evidence.plan_before(place.kind, place.rows, end, rows_of(evidence, "plan"))
    return evidence.at("plan", "backend", plans)


def rows_of(evidence: Evidence, kind: str) -> Int64Array:
    return np.arange(evidence.count(kind), dtype=np.int64)


def pad_place(evidence: Evidence, plans: Int64Array | None = None) -> Place:
    """The pads of whole forwards, with the mode they were met in."""
    pads = evidence.top_pads
    modes = evidence.snapshot("pad", "entry", "forward_mode", pads)
    return Place("pad", pads, modes, plans, pads)


def _no_text(rows: Int64Array) -> Int64Array:
    return np.full(rows.shape, NO_ROW, dtype=np.int64)
