"""Where a number came from: the recorded provenance, or what the order of events shows.

A replay stores the arithmetic of SGLang's own calls in `about["chains"]` (a key
`process/enter_seq/column` to an index of `about["chain_texts"]`). Without it only the events
themselves are told; no arithmetic is invented.
"""

from __future__ import annotations

from padtrace.contracts import wording
from padtrace.contracts.evidence import Evidence
from padtrace.contracts.model import Finding

_LEFT_COLUMNS = ("exit.input_ids.rows", "input_ids.rows", "q.shape", "entry.input_ids.rows")


def stored(evidence: Evidence, kind: str, row: int, columns: tuple[str, ...]) -> list[str]:
    """The recorded chain of the first of these columns that has one, otherwise empty."""
    about = evidence.about
    if row < 0 or not about.chains:
        return []
    process = int(evidence.column(kind, "process")[row])
    entered = int(evidence.column(kind, "enter_seq")[row])
    for column in columns:
        index = about.chains.get(f"{process}/{entered}/{column}")
        if index is not None:
            return list(about.chain_texts[index])
    return []


def left_chain(evidence: Evidence, finding: Finding) -> list[str]:
    """How the left side came to its value: for q, through the pad."""
    if finding.left.name != "q.rows":
        return []
    if finding.event != "pad":
        chain = stored(evidence, finding.event, finding.row, (finding.left.name, *_LEFT_COLUMNS))
        if chain:
            return chain
    chain = stored(evidence, "pad", finding.pad_row, (finding.left.name, *_LEFT_COLUMNS))
    if chain:
        return chain
    if finding.pad_row < 0:
        return []
    before = wording.snapshot_number(evidence, "pad", "entry", "input_ids.rows", finding.pad_row)
    padded = wording.snapshot_number(evidence, "pad", "exit", "input_ids.rows", finding.pad_row)
    function = evidence.text(int(evidence.column("pad", "function")[finding.pad_row]))
    chain = [] if before is None else [str(before)]
    if padded is not None:
        chain.append(f"{function or 'pad'} -> {padded}")
    if padded != finding.left.value:
        shard = "this rank's shard" if wording.sharded(evidence, finding) else "rows at the call"
        chain.append(f"{shard} -> {finding.left.value}")
    return chain


def right_chain(evidence: Evidence, finding: Finding) -> list[str]:
    """How the right side came to its value: for metadata, through the plan."""
    columns: tuple[str, ...] = (finding.right.name,)
    if finding.right.name == "num_splits.rows":
        columns = (*columns, "planned.rows")
    chain = stored(evidence, "plan", finding.plan_row, columns)
    if chain:
        return chain
    if finding.plan_row < 0:
        return []
    when = f" {finding.planned}" if finding.planned else ""
    if finding.right.name == "num_splits.rows":
        start = wording.planned_rows(evidence, finding)
        told = f"{start} planned{when}" if when else f"{start}"
    else:
        # Nothing shows that this quantity was made from them; it is what the plan met.
        row = finding.plan_row
        start = wording.snapshot_number(evidence, "plan", "entry", "input_ids.rows", row)
        told = f"{start} rows of input_ids at the plan{when}"
    chain = [] if start is None else [told]
    function = evidence.text(int(evidence.column("plan", "function")[finding.plan_row]))
    chain.append(f"{function or 'plan'} -> {finding.right.value}")
    return chain
