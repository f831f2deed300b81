"""From a result to the exit code that scripts rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from padtrace.contracts.engine import CLEAN, DIVERGENT, NOTHING_OBSERVED
from padtrace.contracts.model import Report
from padtrace.errors import EXIT_CLEAN, EXIT_DIVERGENCE, EXIT_NOTHING_OBSERVED

if TYPE_CHECKING:
    from padtrace.explore.differences import Differences

CODES = {
    CLEAN: EXIT_CLEAN,
    DIVERGENT: EXIT_DIVERGENCE,
    NOTHING_OBSERVED: EXIT_NOTHING_OBSERVED,
}


def exit_code(report: Report, verdict: str | None = None) -> int:
    """0 clean, 1 divergent, 5 nothing observed."""
    return CODES[verdict or report.verdict]


def of_comparison(differences: Differences) -> str:
    """Verdict on two recordings: alike, different, or nothing that both observed."""
    if differences.differ:
        return DIVERGENT
    return CLEAN if differences.compared_values else NOTHING_OBSERVED
