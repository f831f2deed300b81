"""`padtrace replay` for people: what the recorded events say at once, then the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from padtrace.contracts.engine import NOTHING_OBSERVED, check
from padtrace.contracts.known import KnownReports
from padtrace.recording.model import Recording
from padtrace.report import terminal, words
from padtrace.report.summary import compare_fingerprints, differing_fingerprints, releases

if TYPE_CHECKING:
    from padtrace.explore.rerun import Outcome

Progress = Callable[[int, int, str], None]


class ReplayView:
    """Prints one replay; silent where the result is printed as JSON."""

    def __init__(self, out: Console, *, quiet: bool) -> None:
        self.out = out
        self.quiet = quiet

    def before(self, recording: Recording, known: KnownReports, path: str) -> None:
        """The first line, from the recorded events alone, while SGLang still loads."""
        if self.quiet:
            return
        report = check(recording, {"PT101"}, known=known)
        if report.verdict == NOTHING_OBSERVED:
            count = words.plural(recording.rows("forward"), "forward")
            text = f"recorded: {path} holds {count}, and no result that PT101 could judge"
        else:
            text = f"recorded: {terminal.diagnosis(report)}"
        self.out.print(Text(text, style="bold"))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A progress line on a terminal; nothing elsewhere."""
        if self.quiet or not self.out.is_terminal:
            yield lambda done, total, text: None
            return
        with self.out.status("loading SGLang") as status:

            def tell(done: int, total: int, text: str) -> None:
                status.update(f"replaying {done:,} of {total:,} batches" if total else text)

            yield tell

    def after(self, outcome: Outcome, known: KnownReports, path: str, written: Path | None) -> None:
        """What the replay gave, held against the recording."""
        # Not at the top: the first line need not wait for it.
        from padtrace.report import rows_view

        out, replayed = self.out, outcome.replayed
        name = ", ".join(releases(replayed)) or "the given SGLang"
        out.print(Text(f"replayed on SGLang {name}: {terminal.diagnosis(outcome.report)}"))
        out.print()
        rows_view.print_rows(out, replayed)
        for line in (*driven_lines(replayed), *kernel_lines(replayed)):
            out.print(Text(line, style="dim"))
        self._compared(outcome, name)
        if written is not None:
            out.print(f"written to {written}\n")
        terminal.print_report(out, replayed, outcome.report, known, path=path, headline=False)
        # Once more as the last thing, where eyes are when a long run ends.
        terminal.print_headline(out, outcome.report)

    def _compared(self, outcome: Outcome, name: str) -> None:
        from padtrace.report import differences_view

        out, result = self.out, outcome.differences
        if result.compared_values:
            line = f"recorded against replayed: {differences_view.headline(result)}"
            out.print(Text(line, style="bold"))
            ignored = ", ".join(f"{count:,} {reason}" for reason, count in result.ignored.items())
            if ignored:
                out.print(Padding(Text(f"left out: {ignored}", style="dim"), (0, 0, 0, 2)))
            if not outcome.same_release and result.differences:
                note = f"the recording is of another release than {name}: differences are expected"
                out.print(Padding(Text(note), (0, 0, 0, 2)))
            out.print()
            differences_view.print_fields(out, result)
            differences_view.print_outside_edits(out, result)
        fingerprints = compare_fingerprints(outcome.recorded, outcome.replayed)
        out.print(Text(f"source fingerprints: {fingerprints}", style="dim"))
        changed = differing_fingerprints(outcome.recorded, outcome.replayed)
        if changed and outcome.same_release:
            out.print(
                Padding(Text(f"not the release's source: {', '.join(changed)}"), (0, 0, 0, 2))
            )
        out.print()


def driven_lines(replayed: Recording) -> list[str]:
    """What SGLang's own path was driven for, on which device shown, and what was not and why."""
    told = replayed.coverage.get("driven")
    if not isinstance(told, dict):
        return []
    left_out = told.get("not_driven") or {}
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    device = told.get("device") or {}
    shown = f", shown as {device['shown']}" if device.get("shown") else ""
    line = f"driven: {words.plural(told.get('driven', 0), 'forward')}{shown}"
    lines = [f"{line}; not driven: {reasons}" if reasons else f"{line}; none left out"]
    if device.get("assumed"):
        lines.append(f"assumed: {device['assumed']}")
    return lines


def kernel_lines(replayed: Recording) -> list[str]:
    """Which FlashMLA implementation was asked, what it said, and which launches got no answer."""
    replay = replayed.coverage.get("replay")
    kernel = replay.get("kernel") if isinstance(replay, dict) else None
    if not isinstance(kernel, dict) or not kernel.get("name"):
        return []
    outcomes = kernel.get("outcomes") or {}
    told = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
    why = f" (no real kernel: {kernel['why']})" if kernel.get("why") else ""
    lines = [f"FlashMLA launches: {kernel['name']}: {told or 'none asked'}{why}"]
    lines += [f"launch without an answer: {text}" for text in kernel.get("without_answer") or []]
    return lines
