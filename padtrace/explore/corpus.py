"""The regression corpus: public reports and healthy baselines, each with its right verdict.

What is right is data, written down from measurements and reports; nothing here works it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from padtrace.contracts.engine import check
from padtrace.contracts.known import KnownReports
from padtrace.errors import EnvironmentMissingError, UsageError
from padtrace.explore.across import forwards_of
from padtrace.explore.make import Plan, make
from padtrace.recording.model import Recording
from padtrace.replay.releases import as_version

Progress = Callable[[str], None]


class Expected(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is right on one release.

    Attributes:
        finds: ids of exactly the contracts that must be broken.
        q_rows, num_splits: of the first padded forward; not compared where None.
    """

    finds: list[str]
    q_rows: int | None = None
    num_splits: int | None = None


class Case(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One configuration with its right verdicts.

    Attributes:
        kind: `report` (something is wrong on some release) or `healthy`.
        reports: public reports it is of, `project#number`; a finding must name them where they
            are among the known reports.
        input: as `padtrace make` takes it: one input, or a list of them, one per rank.
        plan: when metadata are planned, as `padtrace make --plan`.
        facts: facts of the process that the input cannot say, e.g. the device.
        expected: by release.
        left_out: release to the reason why nothing is expected of it.
        source: where the configuration comes from.
        obtained: how the right values were obtained.
    """

    id: str
    kind: Literal["report", "healthy"]
    input: dict[str, Any] | list[dict[str, Any]]
    expected: dict[str, Expected]
    source: str
    obtained: str
    reports: list[str] = []
    plan: Plan = "auto"
    facts: dict[str, Any] = {}
    left_out: dict[str, str] = {}


class Undecided(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An open report that is not in the corpus, and why."""

    report: str
    why: str


class Corpus(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The data file."""

    about: str
    releases: list[str]
    cases: list[Case]
    undecided: list[Undecided] = []


@dataclass(frozen=True, slots=True)
class Judged:
    """One case on one release; `wrong` says in words what was not as expected."""

    case: Case
    release: str
    found: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(slots=True)
class Result:
    """What running the corpus gave; `not_run` is release to reason."""

    judged: list[Judged] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)

    def cases(self, kind: str) -> dict[str, bool]:
        """Ids of the cases of a kind that ran, each with whether it was right on every release."""
        right: dict[str, bool] = {}
        for entry in self.judged:
            if entry.case.kind == kind:
                right[entry.case.id] = right.get(entry.case.id, True) and not entry.wrong
        return right

    @property
    def complete(self) -> bool:
        """Whether everything ran and everything was right."""
        return bool(self.judged) and not self.not_run and not any(e.wrong for e in self.judged)

    def line(self) -> str:
        """The last line: recall and precision."""
        reports, healthy = self.cases("report"), self.cases("healthy")
        alarms = sum(not right for right in healthy.values())
        return (
            f"corpus: {sum(reports.values())} of {len(reports)} found, {alarms} false alarms on "
            f"{len(healthy)} healthy"
        )


def load(path: Path) -> Corpus:
    """Read a corpus file.

    Raises:
        UsageError: it cannot be read or is none.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Corpus)
    except OSError as error:
        raise UsageError(f"cannot read {path}", f"{error.strerror}", "check the path") from error
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{path} is no corpus", str(error), "see recordings/corpus/README.md for its keys"
        ) from error
    for name in {*found.releases, *(name for case in found.cases for name in case.expected)}:
        if as_version(name) is None:
            raise UsageError(
                f"{path} names a release that is no version",
                f"it names {name[:64]!a}; a file never chooses a path",
                "name releases such as 0.5.18",
            )
    return found


def run(corpus: Corpus, releases: Sequence[str], *, progress: Progress) -> Result:
    """Replay every case on every release and compare with what is right.

    A release that cannot be had is counted as not run; it is fetched if it is not here.
    """
    from padtrace.replay import service

    result = Result()
    for release in releases:
        try:
            with service.session():
                result.judged += _on(corpus, release, progress)
        except EnvironmentMissingError as error:
            result.not_run[release] = "; ".join(error.lines()[:2])
            progress(f"SGLang {release} not run: {result.not_run[release]}")
    return result


def _on(corpus: Corpus, release: str, progress: Progress) -> list[Judged]:
    from padtrace.replay import service

    judged = []
    for case in corpus.cases:
        if release in case.expected:
            replayed = service.replay(recording_of(case), sglang=release, kernels="off")
            judged.append(judge(case, release, replayed))
    wrong = [entry for entry in judged if entry.wrong]
    progress(f"SGLang {release}: {len(judged)} cases, {len(wrong)} wrong")
    for entry in wrong:
        for line in entry.wrong:
            progress(f"  {entry.case.id}: {line}")
    return judged


def recording_of(case: Case) -> Recording:
    """The recording of a case before anything was padded."""
    given = case.input if isinstance(case.input, list) else [case.input]
    # Several inputs are ranks of one step.
    made = make([{"id": case.id, "step": 1, "input": one} for one in given], case.plan)
    for facts in made.facts:
        facts.update(case.facts)
    return made


def judge(case: Case, release: str, replayed: Recording) -> Judged:
    """Hold the findings and the rows of a replay against what is right."""
    report = check(replayed)
    expected = case.expected[release]
    found = tuple(dict.fromkeys(group.first.contract for group in report.groups))
    wrong = [f"{name} is not found" for name in expected.finds if name not in found]
    for group in report.groups:
        if group.first.contract not in expected.finds:
            wrong.append(f"{group.first.contract} is a false alarm: {group.first.sentence}")
    forwards = list(forwards_of(replayed).values())
    for name in ("q_rows", "num_splits"):
        wanted = getattr(expected, name)
        given = getattr(forwards[0], name) if forwards else None
        if wanted is not None and wanted != given:
            wrong.append(f"{name} is {given}, measured {wanted}")
    if expected.finds:
        named = {report_id for group in report.groups for report_id in group.first.known_reports}
        known = KnownReports.shipped()
        wrong += [
            f"no finding names {report_id}"
            for report_id in case.reports
            if known.get(report_id) is not None and report_id not in named
        ]
    return Judged(case, release, found, tuple(wrong))
