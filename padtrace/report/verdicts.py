"""The one place where a verdict becomes a first line, a last line and an exit code.

Text, JSON and exit code of a command are all taken from one `Judgement`, so that they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from padtrace.contracts.engine import (
    CLEAN,
    DIVERGENT,
    INCOMPLETE,
    NOT_REPRODUCED,
    NOTHING_OBSERVED,
)
from padtrace.contracts.model import Finding, Forwards, Report, Severity
from padtrace.errors import (
    EXIT_CLEAN,
    EXIT_DIVERGENCE,
    EXIT_INCOMPLETE,
    EXIT_NOT_REPRODUCED,
    EXIT_NOTHING_OBSERVED,
)
from padtrace.report.words import plural

if TYPE_CHECKING:
    from padtrace.explore.differences import Differences
    from padtrace.explore.rerun import Outcome

CODES = {
    CLEAN: EXIT_CLEAN,
    DIVERGENT: EXIT_DIVERGENCE,
    NOTHING_OBSERVED: EXIT_NOTHING_OBSERVED,
    INCOMPLETE: EXIT_INCOMPLETE,
    NOT_REPRODUCED: EXIT_NOT_REPRODUCED,
}
STYLES = {Severity.CRASH: "bold red", Severity.SILENT: "bold magenta", Severity.SUSPECT: "yellow"}
_PT101_ALONE = ("PT101",)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with the words for it.

    Attributes:
        headline: the first line of a report, and the last one of a replay.
        last: the last line of a report.
        style: of both, on a terminal.
        report: the findings and counts it stands on.
        unjudged_allowed: forwards that nobody judged do not count against the exit code.
    """

    verdict: str
    headline: str
    last: str
    style: str
    report: Report
    unjudged_allowed: bool = False

    @property
    def exit_code(self) -> int:
        return exit_code(self.verdict, allow_unjudged=self.unjudged_allowed)


def exit_code(verdict: str, *, allow_unjudged: bool = False) -> int:
    """0 clean, 1 divergent, 5 nothing observed or incomplete, 6 not reproduced.

    Args:
        allow_unjudged: whether "nothing found, but not all judged" will do.
    """
    return EXIT_CLEAN if allow_unjudged and verdict == INCOMPLETE else CODES[verdict]


def of_report(report: Report, *, allow_unjudged: bool = False) -> Judgement:
    """The judgement of one checked recording."""
    return Judgement(
        report.verdict, _headline(report), _last(report), _style(report), report, allow_unjudged
    )


def of_outcome(outcome: Outcome, *, allow_unjudged: bool = False) -> Judgement:
    """The judgement of a replay."""
    if outcome.verdict == NOT_REPRODUCED:
        told = not_reproduced(outcome)
        return Judgement(NOT_REPRODUCED, told, told, "bold yellow", outcome.report)
    found = of_report(outcome.deciding, allow_unjudged=allow_unjudged)
    if not outcome.recorded_decides:
        return found
    recorded = "in the recorded values, which the replay does not show"
    return Judgement(
        verdict=found.verdict,
        headline=f"recorded: {found.headline}",
        last=f"{found.last} {recorded}",
        style=found.style,
        report=found.report,
    )


def of_comparison(differences: Differences) -> str:
    """Verdict on two recordings: alike, different, or nothing that both observed."""
    if differences.differ:
        return DIVERGENT
    return CLEAN if differences.compared_values else NOTHING_OBSERVED


def not_reproduced(outcome: Outcome) -> str:
    """Where the same release, driven again, parts from what it did on the server."""
    from padtrace.explore.rerun import compared

    own = compared(outcome.replayed)
    if own is not None:
        told = f"not reproduced: {own.different:,} differences"
        for first in own.differences[:1]:
            told += f", first {first.column}: recorded {first.recorded}, driven {first.driven}"
        return told
    differences = outcome.differences
    only = {
        f"{kind} only {side}": count
        for side, counts in (
            ("recorded", differences.only_left),
            ("replayed", differences.only_right),
        )
        for kind, count in counts.items()
    }
    if differences.differences:
        shown = differences.differences[0]
        where = f"{shown.field} at rank {shown.rank} step {shown.step}"
        values = f"{differences.total:,} of {differences.compared_values:,} values differ"
        return f"not reproduced: {values}, first {where}"
    told = ", ".join(f"{count:,} {what}" for what, count in only.items())
    return f"not reproduced: events without a counterpart: {told}"


def told(finding: Finding) -> str:
    """The sentence of a finding, with the first public report that has its signature."""
    known = f" - {finding.known_reports[0]}" if finding.known_reports else ""
    return f"{finding.sentence}{known}"


def nothing_found_in(forwards: Forwards) -> str:
    """`nothing found in 40 of 42 forwards`."""
    return f"nothing found in {forwards.judged:,} of {forwards.total:,} forwards"


def _headline(report: Report) -> str:
    """The most telling finding, or what was looked at."""
    asked = ", ".join(report.asked)
    if report.verdict == DIVERGENT:
        return told(report.groups[0].first)
    if report.verdict == INCOMPLETE:
        reasons = report.forwards.not_judged
        most = max(reasons, key=lambda reason: reasons[reason])
        more = f" and {plural(len(reasons) - 1, 'more reason')}" if len(reasons) > 1 else ""
        return f"{nothing_found_in(report.forwards)}; not judged: {most}{more}"
    if report.verdict == CLEAN:
        if report.asked == _PT101_ALONE:
            judged = plural(report.forwards.judged, "forward")
            return f"clean: num_splits fits q in {judged} looked at"
        total = sum(report.evaluated.get(name, 0) for name in report.asked)
        return f"clean: {asked} held in {plural(total, 'place')} looked at"
    return f"nothing observed: this recording holds nothing that lets {asked} be judged"


def _last(report: Report) -> str:
    suspects = plural(len(report.groups), "suspect") if report.groups else ""
    beside = f", {suspects} (--strict counts them)" if suspects else ""
    if report.verdict == CLEAN:
        return f"clean{beside}"
    if report.verdict == INCOMPLETE:
        return f"incomplete: {nothing_found_in(report.forwards)}{beside}"
    if report.verdict == NOTHING_OBSERVED:
        return f"nothing observed: no verdict{beside}"
    total = sum(group.count for group in report.groups)
    return f"divergent: {plural(total, 'finding')}, {plural(len(report.groups), 'signature')}"


def _style(report: Report) -> str:
    if report.verdict == DIVERGENT:
        return STYLES[report.groups[0].first.severity]
    return "bold green" if report.verdict == CLEAN else "bold yellow"
