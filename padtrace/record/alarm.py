"""The live alarm: one line in the server's log before the kernel's own error.

It says both lengths, who set each and in which order, and what to run next. It reads integers that
the probes hold anyway.
"""

from __future__ import annotations

import logging
import os

from padtrace.contracts.rows import num_splits_agrees, num_splits_expected
from padtrace.one_line import one_line
from padtrace.record.native import Snapshot
from padtrace.record.snapshots import METADATA_READY, REPLAN_EQUIVALENT, TOKEN_ROWS
from padtrace.record.state import BatchRecord, State

logger = logging.getLogger("padtrace")

# A server that goes on after a mismatch meets it again at every step.
MAX_LINES = 5


class Alarm:
    """See the module. One per process."""

    def __init__(self, state: State, folder: str) -> None:
        """
        Args:
            folder: where the rings are, for the command to run next.
        """
        self._state = state
        self._next = f"padtrace seal {one_line(folder)} -o crash.safetensors && padtrace diff "
        self._next += "crash.safetensors"
        self._lines = 0
        self._told: set[tuple[str, int]] = set()

    def launch(self, function: str, record: BatchRecord, q_rows: int, splits: int) -> None:
        """A FlashMLA call with shapes not seen in this forward yet."""
        if q_rows < 0 or splits < 0 or num_splits_agrees(q_rows, splits):
            return
        self._state.writer.divergence()
        self._told.add(("rows", record.number))
        self._say(
            f"{function} gets q with {q_rows} rows and num_splits with {splits}, "
            f"needs {num_splits_expected(q_rows)}; {_history(record)}"
        )

    def padded(self, record: BatchRecord, after: Snapshot) -> None:
        """A pad has ended; asked only where launches cannot be seen.

        A batch marked ready is not planned again unless a re-plan is declared equivalent, so its
        plan will meet the padded rows.
        """
        rows = after.scalar(TOKEN_ROWS)
        will_not_replan = after.scalar(METADATA_READY) == 1 and after.scalar(REPLAN_EQUIVALENT) != 1
        if record.planned_by is None or rows < 0 or not will_not_replan:
            return
        if not num_splits_agrees(rows, record.planned_splits):
            self._state.writer.divergence()
            self._told.add(("rows", record.number))
            self._say(
                f"q will have {rows} rows and num_splits {record.planned_splits}, "
                f"needs {num_splits_expected(rows)}; {_history(record)}"
            )

    def failed(self, function: str, record: BatchRecord) -> None:
        """An exception left a hooked function; nothing more to say where the rows were told."""
        if ("rows", record.number) in self._told:
            return
        self._say(f"an exception left {function or 'a hooked function'}; {_history(record)}")

    def _say(self, text: str) -> None:
        if self._lines >= MAX_LINES:
            return
        self._lines += 1
        state = self._state
        where = f"process {os.getpid()} step {state.step}"
        if state.forward >= 0:
            where += f" forward {state.forward}"
        # The names come from SGLang and from the user's folders.
        logger.error("padtrace alarm: %s: %s. Next: %s", where, one_line(text), self._next)


def _history(record: BatchRecord) -> str:
    """Who planned and who padded the batch, in their order."""
    parts: list[tuple[int, str]] = []
    if record.planned_by is not None:
        parts.append((record.planned_seq, _planned(record)))
    if record.padded_by is not None:
        parts.append((record.padded_seq, _padded(record)))
    if not parts:
        return f"batch {record.number}: nothing planned or padded it yet"
    return f"batch {record.number}: " + ", then ".join(text for _, text in sorted(parts))


def _planned(record: BatchRecord) -> str:
    rows = f" for {record.planned_rows} rows" if record.planned_rows >= 0 else ""
    made = f"planned num_splits {record.planned_splits}{rows}"
    return f"{record.planned_by} {made} (event {record.planned_seq})"


def _padded(record: BatchRecord) -> str:
    rows = f"from {record.rows_before_pad} to {record.rows_after_pad} rows"
    return f"{record.padded_by} took q {rows} (event {record.padded_seq})"
