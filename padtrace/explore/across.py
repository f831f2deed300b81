"""One recording on many releases: who is wrong, since when, and what changed in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from padtrace.contracts.engine import CLEAN, DIVERGENT, INCOMPLETE, NOTHING_OBSERVED
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.known import KnownReports
from padtrace.contracts.model import Finding
from padtrace.contracts.releases import release_key
from padtrace.contracts.sites import Sites, launch_sites, modes_of, pad_sites, rows_after_pad
from padtrace.errors import EnvironmentMissingError, UsageError
from padtrace.explore.differences import Differences, compare
from padtrace.explore.rerun import Outcome, rerun
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.columns import Int64Array
from padtrace.recording.model import Recording

Progress = Callable[[int, int, str], None]
Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Rows:
    """One padded forward on one release; None is what the release did not come to.

    `draft_step` is -1 where the forward is not of a draft of several steps.
    """

    process: int
    batch: int
    draft_step: int
    mode: str | None
    q_rows: int | None
    num_splits: int | None
    padding_mode: str | None

    @property
    def key(self) -> Key:
        return (self.process, self.batch, self.draft_step)

    @property
    def numbers(self) -> tuple[int | None, int | None, str | None]:
        return (self.q_rows, self.num_splits, self.padding_mode)


@dataclass(frozen=True, slots=True)
class OnRelease:
    """What a replay on one release gave, or why there was none.

    Exactly one of `outcome` and `error` is set; `forwards` are in the recording's order.
    """

    release: str
    outcome: Outcome | None
    forwards: dict[Key, Rows] = field(default_factory=dict)
    error: EnvironmentMissingError | None = None

    @property
    def verdict(self) -> str:
        return self.outcome.verdict if self.outcome else "not run"


@dataclass(frozen=True, slots=True)
class Change:
    """Two neighbouring releases whose replays differ; `before` and `after` name them."""

    before: str
    after: str
    differences: Differences


@dataclass(frozen=True, slots=True)
class Across:
    """The replays of one recording, oldest release first.

    Attributes:
        shown: the forward that the table is about: the first that is wrong on some release, else
            the first whose rows differ, else the first of all; None where nothing was padded.
        verdict: divergent where any release is, clean where all are, incomplete where some are
            and others could not be judged or run.
    """

    recorded: Recording
    releases: list[OnRelease]
    changes: list[Change]
    shown: Key | None
    verdict: str

    @property
    def ran(self) -> list[OnRelease]:
        return [entry for entry in self.releases if entry.outcome]

    @property
    def first_bad(self) -> str | None:
        return next((e.release for e in self.ran if e.verdict == DIVERGENT), None)

    @property
    def first_good(self) -> str | None:
        """The first release that is clean again after a divergent one; without one the oldest
        clean."""
        bad = [entry.verdict == DIVERGENT for entry in self.ran]
        start = bad.index(True) if any(bad) else 0
        return next((e.release for e in self.ran[start:] if e.verdict == CLEAN), None)

    @property
    def last_good_before(self) -> str | None:
        """The last clean release before the first divergent one."""
        found = None
        for entry in self.ran:
            if entry.verdict == DIVERGENT:
                return found
            found = entry.release if entry.verdict == CLEAN else found
        return None

    def findings(self) -> dict[tuple[str, str, str], list[tuple[str, Finding]]]:
        """(contract, quantity, sign) to the releases that show it, each with its first finding."""
        found: dict[tuple[str, str, str], list[tuple[str, Finding]]] = {}
        for entry in self.ran:
            assert entry.outcome is not None
            for group in entry.outcome.deciding.groups:
                first = group.first
                key = (first.contract, first.right.name, first.sign)
                listed = found.setdefault(key, [])
                if all(release != entry.release for release, _ in listed):
                    listed.append((entry.release, first))
        return found


def across(
    recording: Recording,
    releases: Sequence[str],
    *,
    kernels: str = "off",
    only: set[str] | None = None,
    known: KnownReports | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Across:
    """Replay a recording on each of some releases and compare neighbours.

    Workers are ended one by one: each holds some 600 MB.

    Args:
        releases: versions, in any order; told oldest first.

    Raises:
        UsageError: no release is named.
        EnvironmentMissingError: not one of them could be run.
    """
    if not releases:
        raise UsageError("no release is named", "--releases is empty", "--releases 0.5.17,0.5.18")
    tell = progress or _silent

    def replay(release: str) -> Outcome:
        def say(done: int, total: int, text: str) -> None:
            tell(done, total, f"SGLang {release}: {text}")

        return rerun(
            recording,
            sglang=release,
            kernels=kernels,
            only=only,
            known=known,
            strict=strict,
            progress=say,
            reproduce=False,
        )

    ordered = sorted(dict.fromkeys(releases), key=release_key)
    return assemble(recording, [_on(release, replay) for release in ordered])


def assemble(recording: Recording, results: list[OnRelease]) -> Across:
    """Compare replays that were made already, oldest release first.

    Raises:
        EnvironmentMissingError: not one of them could be run.
    """
    if not any(entry.outcome for entry in results):
        assert results[0].error is not None
        raise results[0].error
    return Across(recording, results, list(_changes(results)), _shown(results), _verdict(results))


def _on(release: str, replay: Callable[[str], Outcome]) -> OnRelease:
    from padtrace.replay import service

    try:
        with service.session():
            return of_outcome(release, replay(release))
    except EnvironmentMissingError as error:
        return OnRelease(release, None, error=error)


def of_outcome(release: str, outcome: Outcome) -> OnRelease:
    """A replay with its padded forwards."""
    return OnRelease(release, outcome, forwards_of(outcome.replayed))


def forwards_of(recording: Recording) -> dict[Key, Rows]:
    """Every padded forward of a recording with its rows, in order."""
    evidence = Evidence(recording)
    sites = pad_sites(evidence)
    columns = {
        name: evidence.column("pad", name)[sites.rows]
        for name in ("process", "batch", "draft_step")
    }
    modes = modes_of(evidence, sites)
    q_rows, splits = _at_the_call(evidence, sites)
    padding = evidence.snapshot("pad", "exit", "dp_padding_mode", sites.rows)
    order = np.lexsort((evidence.column("pad", "enter_seq")[sites.rows], columns["process"]))
    found: dict[Key, Rows] = {}
    for index in order:
        process, batch, step = (int(columns[name][index]) for name in columns)
        rows = Rows(
            process=process,
            batch=batch,
            draft_step=step if step > HIGHEST_ABSENT_CODE else -1,
            mode=evidence.text(int(modes[index])),
            q_rows=_number(q_rows[index]),
            num_splits=_number(splits[index]),
            padding_mode=evidence.text(int(padding[index])),
        )
        found.setdefault(rows.key, rows)
    return found


def _at_the_call(evidence: Evidence, sites: Sites) -> tuple[Int64Array, Int64Array]:
    """Rows of q and of num_splits: those of the kernel call, else of the pad and its plan."""
    q_rows = rows_after_pad(evidence, sites.pads)
    splits = evidence.at("plan", "num_splits.rows", sites.plans)
    calls = launch_sites(evidence)
    given = evidence.column("launch", "num_splits.rows")
    seen = present(calls.q_rows) & present(given) & (calls.pads >= 0)
    place = {int(pad): index for index, pad in enumerate(sites.pads)}
    for index in np.flatnonzero(seen):
        position = place.get(int(calls.pads[index]))
        if position is not None:
            q_rows[position], splits[position] = calls.q_rows[index], given[index]
    return q_rows, splits


def _number(value: np.int64) -> int | None:
    return int(value) if value > HIGHEST_ABSENT_CODE else None


def _changes(results: Sequence[OnRelease]) -> Iterator[Change]:
    ran = [entry for entry in results if entry.outcome]
    for before, after in pairwise(ran):
        assert before.outcome is not None
        assert after.outcome is not None
        differences = compare(before.outcome.replayed, after.outcome.replayed)
        if differences.total or differences.only_left or differences.only_right:
            yield Change(before.release, after.release, differences)


def _shown(results: Sequence[OnRelease]) -> Key | None:
    ran = [entry for entry in results if entry.outcome]
    for entry in ran:
        assert entry.outcome is not None
        for group in entry.outcome.deciding.groups:
            first = group.first
            for key in entry.forwards:
                step = first.draft_step if first.draft_step is not None else key[2]
                if key == (first.process, first.batch, step) and entry.verdict == DIVERGENT:
                    return key
    keys = list(dict.fromkeys(key for entry in ran for key in entry.forwards))
    for key in keys:
        if len({e.forwards[key].numbers for e in ran if key in e.forwards}) > 1:
            return key
    return keys[0] if keys else None


def _verdict(results: Sequence[OnRelease]) -> str:
    verdicts = {entry.verdict for entry in results}
    if DIVERGENT in verdicts:
        return DIVERGENT
    if verdicts == {CLEAN}:
        return CLEAN
    return INCOMPLETE if verdicts & {CLEAN, INCOMPLETE} else NOTHING_OBSERVED


def _silent(done: int, total: int, text: str) -> None:
    return None
