"""Replays a whole recording: process by process, batch by batch, equal batches once."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from padtrace.recording import schema
from padtrace.recording.absent import ABSENT_CODES, HIGHEST_ABSENT_CODE, NOT_OBSERVED_CODE
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.facts import Facts, view
from padtrace.recording.model import Recording, Value
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.context import Topology
from padtrace.replay.worker.events import HEADER, RecordedEvent
from padtrace.replay.worker.groups import EventIndex, Group
from padtrace.replay.worker.launches import LaunchJudge
from padtrace.replay.worker.life import BatchLife
from padtrace.replay.worker.outcomes import LifeResult, Outcome
from padtrace.replay.worker.planning import install_kernels
from padtrace.replay.worker.provenance import Chain, Provenance
from padtrace.replay.worker.site import Site

MAX_LISTED_EDITS = 1000
MAX_CHAINS = 200_000
_PROCESS_AT, _ENTER_AT, _EXIT_AT, _PARENT_AT = (
    HEADER.index(name) for name in ("process", "enter_seq", "exit_seq", "parent")
)
_STRINGS_AT = [
    place for place, column in enumerate(schema.HEADER) if column.type is schema.ColumnType.STRING
]


class Release:
    """One imported release; its helpers are wrapped once, before the first replay."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.capabilities = Capabilities(name)
        self.provenance = Provenance()
        self._ready = self._planning_ready = False

    def prepare(self) -> None:
        """Wrap the helpers whose steps a length remembers.

        Raises:
            EnvironmentMissingError: the release lacks one that a replay cannot do without.
        """
        if self._ready:
            return
        self._ready = True
        capabilities, provenance = self.capabilities, self.provenance
        _ = capabilities.pad, capabilities.unpad, capabilities.scale
        utils = capabilities.dsa_utils
        provenance.wrap_arithmetic([capabilities.batch_module, utils])
        provenance.wrap_mode(capabilities.padding_mode)
        provenance.wrap_sizes(capabilities.batch_class)
        provenance.wrap_padded_tokens(utils)

    def prepare_planning(self) -> None:
        """Import the DSA backend and replace its kernels; done when a plan first needs it."""
        if not self._planning_ready:
            install_kernels(self.capabilities, self.provenance)
            self._planning_ready = True


class Replayer:
    """Turns one recording into its replay on one release."""

    def __init__(
        self,
        release: Release,
        recording: Recording,
        progress: Callable[[int, int], None],
        kernels: str = "off",
    ) -> None:
        self._release = release
        self._recording = recording
        self._progress = progress
        self._launches = LaunchJudge(kernels, release.version)
        self._builder = RecordingBuilder(self._about())
        self._edits = 0
        self._edit_list: list[dict[str, Any]] = []
        self._not_replayed: dict[str, int] = {}
        self._equal = 0
        # Most events meet the batch as the one before left it.
        self._last_snapshot: tuple[Any, int] = (None, 0)
        self._strings: dict[int, int] = {code: code for code in ABSENT_CODES}
        self._chains: dict[str, int] = {}
        self._chain_texts: dict[Chain, int] = {}

    def replay(self, processes: range | None = None) -> Recording:
        """Replay the processes, by default all; they are numbered from 0 in the result.

        Raises:
            PadtraceError: the recording lacks what SGLang reads, or the release a capability.
        """
        self._release.prepare()
        if processes is None:
            processes = range(self._recording.rows("process"))
        index = EventIndex(self._recording, processes)
        groups = [list(index.groups(process)) for process in processes]
        total = sum(len(of_process) for of_process in groups)
        done = 0
        for process, of_process in zip(processes, groups, strict=True):
            facts = self._recording.facts[process]
            told = self._restated(facts)
            row = self._builder.add_process(self._recording.process(process), told)
            done = self._replay_process(row, view(facts), of_process, done, total)
        recording = self._builder.finish(self._coverage())
        recording.about["chain_texts"] = [list(chain) for chain in self._chain_texts]
        recording.about["chains"] = self._chains
        return recording

    def _restated(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The facts with the SGLang that makes the rows now; `about` keeps what was recorded."""
        recorded = facts.get("sglang")
        kept = recorded if isinstance(recorded, dict) else {}
        sglang = {name: value for name, value in kept.items() if name != "commit"}
        return {**facts, "sglang": {**sglang, "version": self._release.version}}

    def _replay_process(
        self, process: int, facts: Facts, groups: list[Group], done: int, total: int
    ) -> int:
        capabilities = self._release.capabilities
        # Equal groups are one life.
        numbers: dict[tuple[object, ...], int] = {}
        results: list[LifeResult] = []
        answered: list[tuple[RecordedEvent, Outcome]] = []
        with Topology(capabilities, facts).active() as topology:
            self._prepare(groups)
            site = Site(capabilities, topology, self._release.provenance, self._launches)
            for group in groups:
                number = numbers.setdefault(group.key, len(results))
                if number == len(results):
                    results.append(BatchLife(site).run(group.tree()))
                else:
                    self._equal += 1
                result = results[number]
                answered.extend((group.events[out.index], out) for out in result.outcomes)
                self._note(process, group.events, result)
                done += 1
                if done % 64 == 0 or done == total:
                    self._progress(done, total)
        self._write(process, answered)
        return done

    def _prepare(self, groups: list[Group]) -> None:
        plans = any(event.kind == "plan" for group in groups for event in group.events)
        if plans:
            self._release.prepare_planning()

    def _note(self, process: int, events: list[RecordedEvent], result: LifeResult) -> None:
        for edit in result.edits:
            self._edits += 1
            if len(self._edit_list) < MAX_LISTED_EDITS:
                enter = events[edit.index].integer("enter_seq")
                self._edit_list.append(
                    {"process": process, "enter_seq": enter, "field": edit.field, "count": 1}
                )
        for reason, count in result.not_replayed.items():
            self._not_replayed[reason] = self._not_replayed.get(reason, 0) + count

    def _write(self, process: int, answered: list[tuple[RecordedEvent, Outcome]]) -> None:
        """Write a process's events in the recorded order, errors where they happened.

        Sequence numbers are the recorded ones, moved up by the errors inserted before them.
        """
        inserted = sorted(event.entered for event, out in answered if out.kind == "error")

        def moved(number: int) -> int:
            if number <= HIGHEST_ABSENT_CODE:
                return NOT_OBSERVED_CODE
            return number + bisect.bisect_left(inserted, number) if inserted else number

        answered.sort(key=lambda pair: (pair[0].entered, pair[1].kind == "error"))
        add, keep = self._builder.add_encoded, self._keep_chains
        chains, strings = self._release.provenance.enabled, self._strings
        for event, outcome in answered:
            header = event.header_codes()
            for place in _STRINGS_AT:
                known = strings.get(header[place])
                header[place] = self._string(header[place]) if known is None else known
            for place in (_ENTER_AT, _EXIT_AT, _PARENT_AT):
                header[place] = moved(header[place])
            header[_PROCESS_AT] = process
            if outcome.kind == "error":
                header[_PARENT_AT] = header[_ENTER_AT]
                header[_ENTER_AT] += 1
            if not outcome.ended:
                header[_EXIT_AT] = NOT_OBSERVED_CODE
            add(outcome.kind, header, self._by_row(outcome.values))
            if chains and outcome.chains:
                keep(process, header[_ENTER_AT], outcome)

    def _string(self, code: int) -> int:
        """The number of a recorded string in the new file, when it is first met."""
        text = self._recording.strings[code]
        found = self._strings[code] = self._builder.string_code(text)
        return found

    def _by_row(self, values: dict[str, Value]) -> dict[str, Value]:
        """Snapshots by their row in the new file; equal batches share them."""
        for name in ("entry", "exit"):
            snapshot = values.get(name)
            if isinstance(snapshot, dict):
                if snapshot is not self._last_snapshot[0]:
                    self._last_snapshot = (snapshot, self._builder.snapshot_row(snapshot))
                values[name] = self._last_snapshot[1]
        return values

    def _keep_chains(self, process: int, enter: int, outcome: Outcome) -> None:
        for column, chain in outcome.chains.items():
            if len(self._chains) < MAX_CHAINS:
                index = self._chain_texts.setdefault(chain, len(self._chain_texts))
                self._chains[f"{process}/{enter}/{column}"] = index

    def _about(self) -> dict[str, Any]:
        about = self._recording.about
        return {
            "source": "replay",
            "tier": about.get("tier", "shape"),
            "sglang": self._release.version,
            "release": self._release.name,
            "recorded_on": about.get("sglang"),
            "of_source": about.get("source"),
            "notes": list(about.get("notes") or []),
        }

    def _coverage(self) -> dict[str, Any]:
        coverage = dict(self._recording.coverage)
        coverage["replay"] = {
            "outside_edits": self._edits,
            "outside_edit_list": self._edit_list,
            "not_replayed": self._not_replayed,
            "equal_inputs": self._equal,
            "kernel": self._launches.summary(),
        }
        return coverage
