"""`padtrace record` for people: the server's log, how the recording goes, the first error."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from padtrace.report.words import plain, plural

_STATUS_SECONDS = 30.0


class RecordView:
    """Passes the server's log on and says in between how the recording goes.

    The log goes to stdout as the server wrote it; everything of ours to stderr.
    """

    def __init__(self, err: Console) -> None:
        self.err = err
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        with self._lock:
            sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
            sys.stdout.flush()

    def started(self, rings: Path, log: Path | None) -> None:
        """What outlives this command, should it be killed."""
        with self._lock:
            self.err.print(plain(f"padtrace: rings in {rings}", style="dim"), soft_wrap=True)
            if log is not None:
                self.err.print(plain(f"padtrace: log {log}", style="dim"), soft_wrap=True)

    def status(self, status: Any) -> None:
        """A line now and then, and at once when an alarm or an error was recorded."""
        telling = bool(status.divergences or status.errors)
        if not telling and time.monotonic() - self._last < _STATUS_SECONDS:
            return
        if telling and time.monotonic() - self._last < 2.0:
            return
        self._last = time.monotonic()
        ranks = f"{len(status.ranks)} of {status.expected_ranks or '?'} ranks"
        parts = [f"padtrace: {ranks}", plural(status.forwards, "forward")]
        if status.divergences:
            parts.append(f"{plural(status.divergences, 'divergence')} seen")
        if status.errors:
            parts.append(plural(status.errors, "error"))
        if status.dropped:
            parts.append(f"{plural(status.dropped, 'event')} dropped")
        with self._lock:
            self.err.print(plain(", ".join(parts), style="dim"))

    def first_error(self, found: Any) -> None:
        """The diagnosis while the server is still ending."""
        diagnosis = _diagnosis(found.recording)
        with self._lock:
            self.err.print(plain(f"padtrace: {diagnosis}", style="bold red"))
            self.err.print(
                plain(f"  {found.recording}, sealed {found.seconds:.1f} s after", style="dim")
            )

    def ended(self, result: Any) -> None:
        """Where the recording is and what to run next."""
        err = self.err
        err.print(plain(f"padtrace: the server ended with exit code {result.exit_code}"))
        if result.problem is not None:
            for line in result.problem.lines():
                err.print(plain(f"  {line}", style="bold yellow"))
        if result.recording is not None:
            err.print(plain(f"  recording: {result.recording} ({result.size:,} bytes)"))
        if result.sealed is not None:
            for note in result.sealed.notes:
                err.print(plain(f"  {note}"))
            if result.sealed.missing_ranks:
                listed = ", ".join(str(rank) for rank in result.sealed.missing_ranks)
                err.print(plain(f"  ranks without a recording here: {listed}"))
        if result.rings is not None:
            err.print(plain(f"  rings kept in {result.rings}"))
        if result.log is not None:
            err.print(plain(f"  log kept in {result.log}"))
        err.print(plain(f"  next: {result.next_command}", style="bold"), soft_wrap=True)


def _diagnosis(path: Path) -> str:
    from padtrace.contracts.engine import check
    from padtrace.recording.reader import read
    from padtrace.report import verdicts

    return verdicts.of_report(check(read(path))).headline
