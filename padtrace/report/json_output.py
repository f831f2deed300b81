"""The one JSON object that other programs rely on (`padtrace.findings/1`).

Keys may be added; none is renamed, removed or given another meaning.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from padtrace.contracts.model import Group, Report
from padtrace.one_line import safe_json
from padtrace.recording import about
from padtrace.recording.fingerprint_match import compare_fingerprints
from padtrace.recording.model import Recording
from padtrace.report import summary, verdicts

if TYPE_CHECKING:
    from padtrace.explore.differences import Differences

FORMAT = "padtrace.findings/1"


def findings_object(
    recording: Recording,
    report: Report,
    *,
    path: str | None = None,
    differences: Differences | None = None,
    compared_with: Recording | None = None,
    verdict: str | None = None,
    allow_unjudged: bool = False,
) -> dict[str, Any]:
    """Verdict, coverage, findings and differences as one object.

    Args:
        recording: the recording that was checked.
        compared_with: where it was compared with another one (what a replay was made from).
        verdict: where it is not the report's own.
        allow_unjudged: whether forwards that nobody judged count against the exit code.
    """
    verdict = verdict or report.verdict
    return {
        "format": FORMAT,
        "verdict": verdict,
        "recording": _recording(recording, path),
        "sglang": _sglang(recording, compared_with),
        "coverage": _coverage(recording, report),
        "findings": [finding.as_json() for finding in report.findings],
        "findings_cut": report.cut,
        "groups": [_group(group) for group in report.groups],
        "tolerated": [_group(group) for group in report.tolerated],
        "notes": report.notes,
        "exit_code": verdicts.exit_code(verdict, allow_unjudged=allow_unjudged),
        "differences": [] if differences is None else differences.as_json(),
        **({} if differences is None else {"comparison": differences.totals()}),
    }


def text(value: Any) -> str:
    """Readable JSON, keys in the order given, with nothing that a terminal could obey."""
    return _safe(value, 2)


def line(value: Any) -> str:
    """The same on one line."""
    return _safe(value, None)


def _safe(value: Any, indent: int | None) -> str:
    try:
        encoded = msgspec.json.encode(value)
        told = encoded if indent is None else msgspec.json.format(encoded, indent=indent)
    except UnicodeEncodeError:
        # A file name that is no UTF-8 holds surrogates, which only this encoder writes.
        return safe_json(json.dumps(msgspec.to_builtins(value), indent=indent))
    return safe_json(told.decode())


def _recording(recording: Recording, path: str | None) -> dict[str, Any]:
    stated = about.view(recording.about)
    seen = summary.summarize(recording)
    return {
        "path": path,
        "source": seen.source,
        "tier": seen.tier,
        "of": stated.of,
        "producer": stated.producer,
        "created_ns": stated.created_ns,
        "processes": recording.rows("process"),
        "ranks": seen.ranks,
        "missing_ranks": seen.missing_ranks,
        "steps": seen.steps,
        "forwards": seen.events["forward"],
        "dropped": seen.dropped,
    }


def _sglang(recording: Recording, compared_with: Recording | None) -> dict[str, Any]:
    named = summary.releases(recording)
    return {
        "version": named[0] if len(named) == 1 else (named or None),
        "source": about.view(recording.about).sglang_source,
        "fingerprints": compare_fingerprints(recording, compared_with),
    }


def _coverage(recording: Recording, report: Report) -> dict[str, Any]:
    coverage = recording.coverage
    contracts = {
        name: {"evaluated": report.evaluated[name], "skipped": report.skipped.get(name, {})}
        for name in report.evaluated
    }
    return {
        "hooks": coverage.get("hooks", {}),
        "blind": coverage.get("blind", {}),
        "replay": coverage.get("replay", {}),
        "contracts": contracts,
        "forwards": report.forwards.as_json(),
    }


def _group(group: Group) -> dict[str, Any]:
    first = group.first
    return {
        "contract": first.contract,
        "severity": first.severity.value,
        "sentence": first.sentence,
        "tolerated": first.tolerated,
        "count": group.count,
        "ranks": group.ranks,
        "first_step": group.first_step,
        "last_step": group.last_step,
        "first": first.as_json(),
    }
