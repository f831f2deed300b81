"""What a contract is, and what checking one gives."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from padtrace.recording.columns import Int64Array

if TYPE_CHECKING:
    from padtrace.contracts.evidence import Evidence

BoolArray = NDArray[np.bool_]


class Severity(enum.Enum):
    """What happens on the server when the contract is broken."""

    CRASH = "crash"  # something stops: a kernel, a slice, a collective
    SILENT = "silent"  # nothing stops, the result may be wrong
    SUSPECT = "suspect"  # no harm known; worth a look


@dataclass(frozen=True, slots=True)
class Violations:
    """Rows of one event table that break one rule, as columns of equal length.

    Attributes:
        event_kind: the table the rows belong to.
        rows: rows of that table, shape (n,).
        left_name, left: the quantity the other one must follow.
        right_name, right: the quantity that does not.
        expected: what the right one would have to be.
        plans: row of the plan that made the right side, -1 where none is known.
        pads: row of the pad that made the left side, -1 where there was none.
        modes: string ids of the forward mode, for the report.
        tolerated: entry of the tolerance table that declares it harmless, -1 where none does.
        severity: where it differs from the contract's own.
        outcome: what the kernel or the code did, or would do, with it.
        texts: what the sides are numbers of, where they are told as texts.
    """

    event_kind: str
    rows: Int64Array
    left_name: str
    left: Int64Array
    right_name: str
    right: Int64Array
    expected: Int64Array
    plans: Int64Array | None = None
    pads: Int64Array | None = None
    modes: Int64Array | None = None
    tolerated: Int64Array | None = None
    severity: Severity | None = None
    outcome: str = ""
    texts: Sequence[str] | None = None


@dataclass(slots=True)
class Evaluation:
    """How often one contract was evaluated, why it was not elsewhere, and what broke it.

    `notes` are lines for the reader about what is no finding.
    """

    evaluated: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    violations: list[Violations] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def skip(self, reason: str, count: int) -> None:
        if count:
            self.skipped[reason] = self.skipped.get(reason, 0) + int(count)


@dataclass(frozen=True, slots=True)
class Contract:
    """One invariant.

    Attributes:
        id: stable, `PT101`; the hundreds are the kind (1: T1 and T2, 3: T3, ... 12: T12).
        name: short name.
        kinds: the kinds of the catalogue it decides.
        rule: one line.
        severity: what breaking it does, where the violation itself says nothing else.
        page: the text of `padtrace explain`.
        evaluate: the check itself.
        sentence: the diagnosis of one finding in words, without its contract id.
    """

    id: str
    name: str
    kinds: tuple[str, ...]
    rule: str
    severity: Severity
    page: str
    evaluate: Callable[[Evidence], Evaluation]
    sentence: Callable[[Evidence, Finding], str] | None = None


@dataclass(slots=True)
class Quantity:
    """One side of a finding: its name, its value, what made it.

    `text` is the value where it is no number, such as a forward mode; `value` is None then.
    """

    name: str
    value: int | None
    expected: int | None = None
    chain: list[str] = field(default_factory=list)
    text: str | None = None

    @property
    def shown(self) -> int | str | None:
        """What people and programs see: the text where the quantity is one."""
        return self.value if self.text is None else self.text

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"name": self.name, "value": self.shown}
        if self.expected is not None:
            value["expected"] = self.expected
        value["chain"] = self.chain
        return value


@dataclass(slots=True)
class Finding:
    """One place where a contract does not hold.

    `event` is the kind of the event, `enter_seq` its number in its process; `planned` says
    whether the plan was made "before the pad" or "after the pad", where known.
    """

    contract: str
    name: str
    severity: Severity
    event: str
    row: int
    left: Quantity
    right: Quantity
    process: int
    rank: int | None
    step: int | None
    forward: int | None
    batch: int | None
    draft_step: int | None
    enter_seq: int | None
    worker: str | None
    mode: str | None
    plan_row: int
    pad_row: int
    planned: str | None
    outcome: str
    tolerated: str | None = None
    sentence: str = ""
    known_reports: list[str] = field(default_factory=list)
    avoid: list[str] = field(default_factory=list)

    @property
    def sign(self) -> str:
        """Whether the right side is shorter or longer than it must be."""
        if self.right.value is None or self.right.expected is None:
            return "other"
        return "shorter" if self.right.value < self.right.expected else "longer"

    def as_json(self) -> dict[str, Any]:
        return {
            "contract": self.contract,
            "name": self.name,
            "severity": self.severity.value,
            "rank": self.rank,
            "step": self.step,
            "forward": self.forward,
            "event": self.event,
            "worker": self.worker,
            "left": self.left.as_json(),
            "right": self.right.as_json(),
            "known_reports": self.known_reports,
            "sentence": self.sentence,
            "sign": self.sign,
            "planned": self.planned,
            "mode": self.mode,
            "outcome": self.outcome,
            "avoid": self.avoid,
            "tolerated": self.tolerated,
            "process": self.process,
            "batch": self.batch,
            "draft_step": self.draft_step,
            "enter_seq": self.enter_seq,
        }


@dataclass(slots=True)
class Group:
    """Findings with one signature: the first of them and how many there are.

    `where` names the places: ranks, first and last step.
    """

    first: Finding
    count: int
    ranks: list[int]
    first_step: int | None
    last_step: int | None


@dataclass(slots=True)
class Forwards:
    """How many forwards of backends that plan rows were judged.

    Attributes:
        judged: forwards.
        not_judged: forwards by reason.
        nothing_to_judge: forwards that have no such rows, by reason; they count on neither side.
    """

    judged: int = 0
    not_judged: dict[str, int] = field(default_factory=dict)
    nothing_to_judge: dict[str, int] = field(default_factory=dict)

    @property
    def unjudged(self) -> int:
        return sum(self.not_judged.values())

    @property
    def total(self) -> int:
        return self.judged + self.unjudged

    def as_json(self) -> dict[str, Any]:
        return {
            "judged": self.judged,
            "not_judged": dict(self.not_judged),
            "nothing_to_judge": dict(self.nothing_to_judge),
        }


@dataclass(slots=True)
class Report:
    """The result of a check.

    Attributes:
        findings: what is wrong, at most a bound per signature; most telling first.
        groups: the same by signature, each with its full count.
        tolerated: differences that the backend is declared to put up with, by signature.
        evaluated: evaluations by contract id.
        skipped: by contract id, how often it could not be evaluated and why.
        cut: findings left out of `findings` by the bound.
        verdict: clean, divergent, incomplete or nothing-observed.
        asked: ids of the contracts that had to be evaluated.
        forwards: how many forwards were judged, and why not the others.
        notes: what is worth a line and no finding.
    """

    findings: list[Finding]
    groups: list[Group]
    tolerated: list[Group]
    evaluated: dict[str, int]
    skipped: dict[str, dict[str, int]]
    cut: int
    verdict: str
    asked: tuple[str, ...] = ()
    forwards: Forwards = field(default_factory=Forwards)
    notes: list[str] = field(default_factory=list)
