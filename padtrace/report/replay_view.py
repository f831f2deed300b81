"""`padtrace replay` for people: what the recorded events say at once, then the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding

from padtrace.contracts.engine import DIVERGENT, check
from padtrace.contracts.known import KnownReports
from padtrace.contracts.model import Report
from padtrace.recording import coverage
from padtrace.recording.fingerprint_match import compare_fingerprints, differing_fingerprints
from padtrace.recording.model import Recording
from padtrace.report import terminal, verdicts, words
from padtrace.report.summary import releases
from padtrace.report.words import plain

if TYPE_CHECKING:
    from padtrace.explore.rerun import Outcome

Progress = Callable[[int, int, str], None]


class ReplayView:
    """Prints one replay; silent where the result is printed as JSON."""

    def __init__(self, out: Console, *, quiet: bool) -> None:
        self.out = out
        self.quiet = quiet

    def before(self, recording: Recording, known: KnownReports) -> None:
        """The first line, from the recorded events alone, while SGLang still loads."""
        if self.quiet:
            return
        report = check(recording, {"PT101"}, known=known)
        self.out.print(plain(f"recorded: {_recorded(report)}", style="bold"))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A progress line on a terminal; nothing elsewhere."""
        if self.quiet or not self.out.is_terminal:
            yield lambda done, total, text: None
            return
        with self.out.status("loading SGLang") as status:

            def tell(done: int, total: int, text: str) -> None:
                status.update(plain(f"replaying {done:,} of {total:,} batches" if total else text))

            yield tell

    def after(
        self,
        outcome: Outcome,
        known: KnownReports,
        path: str,
        written: Path | None,
        *,
        allow_unjudged: bool = False,
    ) -> None:
        """What the replay gave, held against the recording; the last line is the verdict."""
        # Not at the top: the first line need not wait for it.
        from padtrace.report import rows_view

        out, replayed = self.out, outcome.replayed
        judgement = verdicts.of_outcome(outcome, allow_unjudged=allow_unjudged)
        name = ", ".join(releases(replayed)) or "the given SGLang"
        out.print(plain(f"replayed on SGLang {name}: {judgement.headline}", style=judgement.style))
        out.print()
        rows_view.print_rows(out, replayed)
        for line in (*driven_lines(replayed), *kernel_lines(replayed)):
            out.print(plain(line, style="dim"))
        self._compared(outcome, name)
        if written is not None:
            out.print(f"written to {written}\n")
        judged = outcome.recorded if outcome.recorded_decides else replayed
        terminal.print_report(
            out, judged, outcome.deciding, known, judgement, path=path, headline=False
        )
        # Once more as the last thing, where eyes are when a long run ends.
        terminal.print_headline(out, judgement)

    def _compared(self, outcome: Outcome, name: str) -> None:
        from padtrace.report import differences_view

        out, result = self.out, outcome.differences
        if result.compared_values:
            line = f"recorded against replayed: {differences_view.headline(result)}"
            out.print(plain(line, style="bold"))
            ignored = ", ".join(f"{count:,} {reason}" for reason, count in result.ignored.items())
            if ignored:
                out.print(Padding(plain(f"left out: {ignored}", style="dim"), (0, 0, 0, 2)))
            if not outcome.same_release and result.differences:
                note = f"the recording is of another release than {name}: differences are expected"
                out.print(Padding(plain(note), (0, 0, 0, 2)))
            out.print()
            differences_view.print_fields(out, result)
            differences_view.print_outside_edits(out, result)
        fingerprints = compare_fingerprints(outcome.recorded, outcome.replayed)
        out.print(plain(f"source fingerprints: {fingerprints}", style="dim"))
        changed = differing_fingerprints(outcome.recorded, outcome.replayed)
        if changed and outcome.same_release:
            out.print(
                Padding(plain(f"not the release's source: {', '.join(changed)}"), (0, 0, 0, 2))
            )
        out.print()


def _recorded(report: Report) -> str:
    """What the recorded events show; the verdict is the replay's."""
    if report.verdict == DIVERGENT:
        return verdicts.of_report(report).headline
    counted = report.forwards
    if not report.evaluated.get("PT101"):
        total = counted.total + sum(counted.nothing_to_judge.values())
        return f"{words.plural(total, 'forward')}, and no result that PT101 could judge"
    return verdicts.nothing_found_in(counted)


def driven_lines(replayed: Recording) -> list[str]:
    """What SGLang's own path was driven for, on which device shown, and what was not and why."""
    told = coverage.view(replayed.coverage).driven
    if told is None:
        return []
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in told.not_driven.items())
    shown = f", shown as {told.device.shown}" if told.device.shown else ""
    line = f"driven: {words.plural(told.driven, 'forward')}{shown}"
    lines = [f"{line}; not driven: {reasons}" if reasons else f"{line}; none left out"]
    if told.device.assumed:
        lines.append(f"assumed: {told.device.assumed}")
    return lines


def kernel_lines(replayed: Recording) -> list[str]:
    """Which FlashMLA implementation was asked, what it said, and which launches got no answer."""
    replay = coverage.view(replayed.coverage).replay
    if replay is None or not replay.kernel.name:
        return []
    kernel = replay.kernel
    told = ", ".join(f"{count:,} {outcome}" for outcome, count in kernel.outcomes.items())
    why = f" (no real kernel: {kernel.why})" if kernel.why else ""
    lines = [f"FlashMLA launches: {kernel.name}: {told or 'none asked'}{why}"]
    lines += [f"launch without an answer: {text}" for text in kernel.without_answer]
    return lines
