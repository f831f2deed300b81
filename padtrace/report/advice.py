"""What to turn on or run next."""

from __future__ import annotations

from padtrace.contracts import forwards, num_splits
from padtrace.contracts.engine import INCOMPLETE, NOTHING_OBSERVED
from padtrace.contracts.model import Report
from padtrace.recording import about
from padtrace.recording.model import Recording

_WITHOUT_GRAPHS = "record again with --disable-cuda-graph in --server-args to see the calls"


def next_steps(recording: Recording, report: Report, path: str | None) -> list[str]:
    """What to run now."""
    name = path or "REC"
    if report.groups:
        return [f"padtrace explain {report.groups[0].first.contract} tells the rule"]
    if report.verdict == INCOMPLETE:
        lines = ["--allow-unjudged accepts forwards that nobody judged"]
        if forwards.IN_GRAPH in report.forwards.not_judged:
            lines.append(_WITHOUT_GRAPHS)
        return lines
    if report.verdict != NOTHING_OBSERVED:
        return []
    if about.view(recording.about).source == "made":
        return [f"a made recording holds no results yet: padtrace replay {name} --sglang VERSION"]
    reasons = report.skipped.get("PT101", {})
    if num_splits.IN_GRAPH in reasons:
        return [_WITHOUT_GRAPHS]
    lines = ["no attention backend here made num_splits: PT101 is about FlashMLA"]
    others = [name for name, count in report.evaluated.items() if count and name != "PT101"]
    if others:
        lines.append(f"other contracts were evaluated: padtrace check {name} --only {others[0]}")
    return lines
