"""Checks a Recording against the contracts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from padtrace.contracts import chains, forwards, tolerances
from padtrace.contracts.catalogue import CONTRACTS
from padtrace.contracts.evidence import NO_ROW, Evidence, pack
from padtrace.contracts.known import KnownReports
from padtrace.contracts.model import (
    Contract,
    Evaluation,
    Finding,
    Group,
    Quantity,
    Report,
    Severity,
    Violations,
)
from padtrace.contracts.sites import PLANNED, planned_before
from padtrace.contracts.wording import number
from padtrace.errors import UsageError
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.columns import Int64Array
from padtrace.recording.model import Recording

MAX_PER_SIGNATURE = 100
CLEAN, DIVERGENT, NOTHING_OBSERVED = "clean", "divergent", "nothing-observed"
INCOMPLETE, NOT_REPRODUCED = "incomplete", "not-reproduced"
ALWAYS_NEEDED = ("PT101",)
_ORDER = {Severity.CRASH: 0, Severity.SILENT: 1, Severity.SUSPECT: 2}


def check(
    recording: Recording,
    only: set[str] | None = None,
    *,
    known: KnownReports | None = None,
    strict: bool = False,
) -> Report:
    """Evaluate the contracts on every event of a recording.

    Args:
        only: ids of the contracts to evaluate; all where None.
        known: public reports to compare findings with; the shipped ones where None.
        strict: count differences that a backend is declared to put up with as suspects.

    Returns:
        the report. "clean" needs that PT101 was evaluated and every forward of a backend that
        plans rows was judged, or that each contract named was evaluated; suspects alone do not
        stand against it, unless `strict`.

    Raises:
        UsageError: `only` names a contract that does not exist.
    """
    chosen = _choose(only)
    evidence = Evidence(recording)
    reports = known or KnownReports.shipped()
    collected: dict[tuple[object, ...], Group] = {}
    kept: dict[tuple[object, ...], list[Finding]] = {}
    evaluated: dict[str, int] = {}
    skipped: dict[str, dict[str, int]] = {}
    notes: list[str] = []
    for contract in chosen:
        result = contract.evaluate(evidence)
        notes += result.notes
        evaluated[contract.id] = result.evaluated
        skipped[contract.id] = result.skipped
        for group, members in _groups(evidence, contract, result, reports):
            key = _key(group.first)
            if key in collected:
                _merge(collected[key], group)
            else:
                collected[key] = group
            kept.setdefault(key, []).extend(members)
    loud = {key: not group.first.tolerated or strict for key, group in collected.items()}
    groups = sorted((g for key, g in collected.items() if loud[key]), key=_rank)
    tolerated = [group for key, group in collected.items() if not loud[key]]
    findings = [f for key, fs in kept.items() if loud[key] for f in fs[:MAX_PER_SIGNATURE]]
    findings.sort(key=lambda finding: _ORDER[finding.severity])
    cut = sum(group.count for group in groups) - len(findings)
    asked = tuple(sorted(only)) if only else ALWAYS_NEEDED
    counted = forwards.count(evidence)
    wrong = any(strict or group.first.severity is not Severity.SUSPECT for group in groups)
    seen = all(evaluated.get(name, 0) for name in asked)
    open_forwards = counted.unjudged if set(asked) >= set(ALWAYS_NEEDED) else 0
    return Report(
        findings=findings,
        groups=groups,
        tolerated=tolerated,
        evaluated=evaluated,
        skipped=skipped,
        cut=cut,
        verdict=_verdict(wrong, seen, open_forwards),
        asked=asked,
        forwards=counted,
        notes=notes,
    )


def _verdict(wrong: bool, seen: bool, open_forwards: int) -> str:
    if wrong:
        return DIVERGENT
    if not seen:
        return NOTHING_OBSERVED
    return INCOMPLETE if open_forwards else CLEAN


def _choose(only: set[str] | None) -> list[Contract]:
    if not only:
        return list(CONTRACTS.values())
    unknown = sorted(only - CONTRACTS.keys())
    if unknown:
        raise UsageError(
            f"there is no contract {unknown[0]}",
            f"known are {', '.join(CONTRACTS)}",
            "`padtrace explain` lists them",
        )
    return [contract for name, contract in CONTRACTS.items() if name in only]


def _rank(group: Group) -> tuple[int, str, int]:
    return (_ORDER[group.first.severity], group.first.contract, -group.count)


def _key(finding: Finding) -> tuple[object, ...]:
    """What makes two findings one signature, whatever the kernel did about them."""
    return (
        *(finding.contract, finding.left.name, finding.right.name, finding.sign, finding.mode),
        *(finding.worker, finding.planned, finding.tolerated, finding.severity),
    )


def _merge(group: Group, other: Group) -> None:
    group.count += other.count
    group.ranks = sorted({*group.ranks, *other.ranks})
    steps = [s for s in (group.first_step, other.first_step) if s is not None]
    ends = [s for s in (group.last_step, other.last_step) if s is not None]
    group.first_step = min(steps, default=None)
    group.last_step = max(ends, default=None)


def _groups(
    evidence: Evidence, contract: Contract, result: Evaluation, reports: KnownReports
) -> Iterable[tuple[Group, list[Finding]]]:
    for violations in result.violations:
        if not violations.rows.size:
            continue
        signatures = _signatures(evidence, violations)
        process = evidence.column(violations.event_kind, "process")[violations.rows]
        step = evidence.column(violations.event_kind, "step")[violations.rows]
        order = np.lexsort((violations.rows, process, step, signatures))
        starts = np.flatnonzero(np.diff(signatures[order], prepend=-1))
        for start, end in zip(starts, [*starts[1:], order.size], strict=True):
            members = order[start:end]
            findings = [
                _finding(evidence, contract, violations, int(i))
                for i in members[:MAX_PER_SIGNATURE]
            ]
            yield _group(evidence, contract, findings, process[members], step[members], reports)


def _signatures(evidence: Evidence, violations: Violations) -> Int64Array:
    """One number per violation; equal ones are told once."""
    kind, rows = violations.event_kind, violations.rows
    none = np.full(rows.shape, NO_ROW, dtype=np.int64)
    plans = none if violations.plans is None else violations.plans
    columns = [
        np.sign(violations.right - violations.expected),
        none if violations.modes is None else violations.modes,
        evidence.column(kind, "worker")[rows],
        _planned_before(evidence, violations, slice(None)),
        evidence.at("plan", "function", plans),
        evidence.snapshot("plan", "entry", "spec_info.num_tokens_per_req", plans),
        none if violations.tolerated is None else violations.tolerated,
    ]
    _, signatures = np.unique(pack(columns), return_inverse=True)
    return signatures.astype(np.int64).reshape(rows.shape)


def _planned_before(evidence: Evidence, violations: Violations, part: slice) -> Int64Array:
    """Of some violations; a long run has very many, of which a few become findings."""
    if violations.plans is None or violations.pads is None:
        return np.full(violations.rows[part].shape, -1, dtype=np.int64)
    return planned_before(evidence, violations.plans[part], violations.pads[part])


def _finding(evidence: Evidence, contract: Contract, violations: Violations, index: int) -> Finding:
    kind, row = violations.event_kind, int(violations.rows[index])
    process = int(evidence.column(kind, "process")[row])
    planned = int(_planned_before(evidence, violations, slice(index, index + 1))[0])
    entry = -1 if violations.tolerated is None else int(violations.tolerated[index])
    tolerated = entry >= 0
    finding = Finding(
        contract=contract.id,
        name=contract.name,
        severity=Severity.SUSPECT if tolerated else violations.severity or contract.severity,
        event=kind,
        row=row,
        left=Quantity(violations.left_name, _value(violations.left[index])),
        right=Quantity(
            violations.right_name,
            _value(violations.right[index]),
            _value(violations.expected[index]),
        ),
        process=process,
        rank=number(evidence, "process", "global_rank", process),
        step=number(evidence, kind, "step", row),
        forward=number(evidence, kind, "forward", row),
        batch=number(evidence, kind, "batch", row),
        draft_step=number(evidence, kind, "draft_step", row),
        enter_seq=number(evidence, kind, "enter_seq", row),
        worker=evidence.text(int(evidence.column(kind, "worker")[row])),
        mode=None if violations.modes is None else evidence.text(int(violations.modes[index])),
        plan_row=NO_ROW if violations.plans is None else int(violations.plans[index]),
        pad_row=NO_ROW if violations.pads is None else int(violations.pads[index]),
        planned=PLANNED.get(planned),
        outcome=violations.outcome,
    )
    if tolerated:
        finding.tolerated = tolerances.table()[entry].why
    if violations.texts is not None:
        for side in (finding.left, finding.right):
            side.text = None if side.value is None else violations.texts[side.value]
            side.value = side.expected = None
    finding.left.chain = chains.left_chain(evidence, finding)
    finding.right.chain = chains.right_chain(evidence, finding)
    return finding


def _value(code: np.int64) -> int | None:
    return int(code) if code > HIGHEST_ABSENT_CODE else None


def _group(
    evidence: Evidence,
    contract: Contract,
    findings: list[Finding],
    processes: Int64Array,
    steps: Int64Array,
    reports: KnownReports,
) -> tuple[Group, list[Finding]]:
    first = findings[0]
    for finding in findings:
        matches = [] if finding.tolerated else reports.matching(evidence, finding)
        finding.known_reports = [report.id for report in matches]
        finding.avoid = list(dict.fromkeys(r.avoid for r in matches if r.avoid))
        finding.sentence = (
            contract.sentence(evidence, finding) if contract.sentence else _plain(finding)
        )
    ranks = [
        rank
        for process in np.unique(processes)
        if (rank := number(evidence, "process", "global_rank", int(process))) is not None
    ]
    group = Group(
        first=first,
        count=int(processes.size),
        ranks=ranks,
        first_step=first.step,
        last_step=_last(steps),
    )
    return group, findings


def _last(steps: Int64Array) -> int | None:
    value = int(steps.max())
    return value if value >= 0 else None


def _plain(finding: Finding) -> str:
    right = finding.right
    needs = f", needs {right.expected}" if right.expected is not None else ""
    return f"{right.name} {right.value}{needs}: {finding.left.name} is {finding.left.value}"
