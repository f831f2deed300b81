"""Words that several contracts share when they tell a finding."""

from __future__ import annotations

from padtrace.contracts.evidence import Evidence
from padtrace.contracts.model import Finding
from padtrace.recording.absent import HIGHEST_ABSENT_CODE

STOPPED = 'the kernel stopped: "num_splits must have shape (b+1)"'
STOPS = 'the FlashMLA kernel stops on this: "num_splits must have shape (b+1)"'
WOULD_STOP = 'the FlashMLA kernel would stop: "num_splits must have shape (b+1)"'


def who(finding: Finding) -> str:
    """`DRAFT_EXTEND_V2 (draft worker)`."""
    mode = finding.mode or "a forward"
    return f"{mode} ({finding.worker} worker)" if finding.worker else mode


def number(evidence: Evidence, kind: str, column: str, row: int) -> int | None:
    """One value of a column, None where it is absent in any way."""
    if row < 0:
        return None
    value = int(evidence.column(kind, column)[row])
    return value if value > HIGHEST_ABSENT_CODE else None


def snapshot_number(evidence: Evidence, kind: str, which: str, column: str, row: int) -> int | None:
    """One value of the snapshot of an event, None where it is absent in any way."""
    index = number(evidence, kind, which, row)
    return None if index is None else number(evidence, "snapshot", column, index)


def planned_rows(evidence: Evidence, finding: Finding) -> int | None:
    """Rows the FlashMLA metadata were planned for."""
    planned = number(evidence, "plan", "planned.rows", finding.plan_row)
    if planned is not None:
        return planned
    splits = number(evidence, "plan", "num_splits.rows", finding.plan_row)
    return None if splits is None else splits - 1


def pad_made(evidence: Evidence, finding: Finding) -> str:
    """`made q 8 rows`, or `left q at 6 rows` where the pad changed nothing."""
    padded = snapshot_number(evidence, "pad", "exit", "input_ids.rows", finding.pad_row)
    if padded != finding.left.value:
        whose = "this rank's " if sharded(evidence, finding) else ""
        return f"made {padded} rows, of which q has {whose}{finding.left.value}"
    before = snapshot_number(evidence, "pad", "entry", "input_ids.rows", finding.pad_row)
    after = finding.left.value
    if before == after:
        return f"left q at {after} rows"
    return f"made q {after} rows"


def sharded(evidence: Evidence, finding: Finding) -> bool:
    """Whether each rank has a part of the rows: under context parallelism only."""
    size = number(evidence, "process", "attn_cp_size", finding.process)
    return (size or evidence.facts(finding.process).parallel.attn_cp_size) > 1


def rows(count: int | None) -> str:
    return "1 row" if count == 1 else f"{count} rows"
