"""Replay, compare with what was recorded, check: the verb `replay` as one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from padtrace.contracts.engine import DIVERGENT, NOT_REPRODUCED, check
from padtrace.contracts.known import KnownReports
from padtrace.contracts.model import Report
from padtrace.explore.differences import Differences, compare
from padtrace.recording import about, coverage
from padtrace.recording.fingerprint_match import compare_fingerprints
from padtrace.recording.model import Recording

# What a driven forward does again; the rest is its input, or differs by nature.
_DRIVEN_KINDS = ("plan", "pad", "launch", "unpad")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay gave.

    Attributes:
        recorded_report, report: of the recorded values, and of the driven ones.
        same_release: whether a server ran the very code that was replayed on, by fingerprint;
            only then must every recorded event be met.
        verdict: in this order: a finding on recorded values of the same release, not reproduced, a
            finding on driven values, incomplete or nothing observed, clean.
    """

    recorded: Recording
    replayed: Recording
    recorded_report: Report
    report: Report
    differences: Differences
    same_release: bool
    verdict: str

    @property
    def recorded_decides(self) -> bool:
        """Whether the verdict stands on recorded values that the replay does not show."""
        return self.verdict == DIVERGENT and self.report.verdict != DIVERGENT

    @property
    def deciding(self) -> Report:
        """The report that the verdict stands on."""
        return self.recorded_report if self.recorded_decides else self.report


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
    reproduce: bool = True,
) -> Outcome:
    """Replay a recording and judge the result.

    Args:
        reproduce: whether a replay on the same release that parts from the recording is "not
            reproduced"; otherwise the driven values are judged alone.

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
    return judge(recording, replayed, only=only, known=known, strict=strict, reproduce=reproduce)


def judge(
    recording: Recording,
    replayed: Recording,
    *,
    only: set[str] | None = None,
    known: KnownReports | None = None,
    strict: bool = False,
    reproduce: bool = True,
) -> Outcome:
    """Judge a replay that was made already."""
    report = check(replayed, only, known=known, strict=strict)
    recorded_report = check(recording, only, known=known, strict=strict)
    differences = compare(recording, replayed)
    same = _same_code(recording, replayed)
    verdict = report.verdict
    if same and recorded_report.verdict == DIVERGENT:
        verdict = DIVERGENT
    elif same and reproduce and _parted(recording, replayed, differences):
        verdict = NOT_REPRODUCED
    return Outcome(recording, replayed, recorded_report, report, differences, same, verdict)


def _same_code(recorded: Recording, replayed: Recording) -> bool:
    """Whether a server's recording was replayed on the code it ran.

    A checkout may differ in functions that nobody hashed, so it never counts as the same.
    """
    if about.view(recorded.about).source != "server":
        return False
    if about.view(replayed.about).sglang_source == "checkout":
        return False
    return compare_fingerprints(recorded, replayed) == "match"


def compared(replayed: Recording) -> coverage.Compared | None:
    """What the driver found when it held its events against the recorded ones, if it did."""
    driven = coverage.view(replayed.coverage).driven
    return driven.compared if driven else None


def _parted(recorded: Recording, replayed: Recording, differences: Differences) -> bool:
    """Whether driven events differ from the recorded ones, or have none to be held against."""
    own = compared(replayed)
    if own is not None:
        return own.different > 0
    if differences.total:
        return True
    if "driven" not in replayed.coverage:
        return False
    sides = [differences.only_left]
    # What the recorder dropped, the replay makes again.
    if not (recorded.table("process").column("dropped") > 0).any():
        sides.append(differences.only_right)
    return any(side.get(kind) for side in sides for kind in _DRIVEN_KINDS)


def _silent(done: int, total: int, text: str) -> None:
    return None
