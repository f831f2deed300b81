"""Replay, compare with what was recorded, check: the verb `replay` as one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from padtrace.contracts.engine import DIVERGENT, check
from padtrace.contracts.known import KnownReports
from padtrace.contracts.model import Report
from padtrace.explore.differences import Differences, compare
from padtrace.recording.model import Recording


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay gave.

    `same_release` says whether it ran on the release the recording names; only then does a
    difference between the two speak against the replay or the server's source.
    """

    recorded: Recording
    replayed: Recording
    report: Report
    differences: Differences
    same_release: bool
    verdict: str


def rerun(
    recording: Recording,
    *,
    sglang: str | None,
    kernels: str = "auto",
    only: set[str] | None = None,
    known: KnownReports | None = None,
    strict: bool = False,
    jobs: int | None = None,
    device: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Outcome:
    """Replay a recording and judge the result.

    Raises:
        EnvironmentMissingError: the SGLang asked for cannot be had here.
        UsageError: the recording names no release and none was given.
    """
    from padtrace.replay import service

    replayed = service.replay(
        recording,
        sglang=sglang,
        kernels=kernels,
        jobs=jobs,
        device=device,
        progress=progress or _silent,
    )
    report = check(replayed, only, known=known, strict=strict)
    differences = compare(recording, replayed)
    same = _release(recording) is not None and _release(recording) == _release(replayed)
    verdict = DIVERGENT if same and differences.total else report.verdict
    return Outcome(recording, replayed, report, differences, same, verdict)


def _release(recording: Recording) -> Any:
    return recording.about.get("sglang")


def _silent(done: int, total: int, text: str) -> None:
    return None
