"""Replays a whole recording: process by process, batch by batch, equal batches once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from padtrace.recording import schema
from padtrace.recording.absent import ABSENT_CODES
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.facts import Facts, view
from padtrace.recording.model import Recording, Value
from padtrace.replay.devices import CPU
from padtrace.replay.worker.batches import BatchBuilder
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.compare import Comparer, Comparison, Reproduced
from padtrace.replay.worker.context import Topology
from padtrace.replay.worker.driver import Driven, Driver
from padtrace.replay.worker.events import HEADER
from padtrace.replay.worker.graph_events import GraphEvents
from padtrace.replay.worker.groups import EventIndex, Group
from padtrace.replay.worker.instruments import Instruments
from padtrace.replay.worker.launches import LaunchJudge
from padtrace.replay.worker.provenance import Chain, Provenance
from padtrace.replay.worker.replayed_events import (
    ReplayedEvent,
    next_number,
    of_driven,
    of_recorded,
)

MAX_CHAINS = 200_000
_PROCESS_AT, _ENTER_AT = HEADER.index("process"), HEADER.index("enter_seq")
_STRINGS_AT = [
    place for place, column in enumerate(schema.HEADER) if column.type is schema.ColumnType.STRING
]


class Release:
    """One imported release; its helpers are wrapped once, before the first replay."""

    def __init__(self, name: str, version: str, device: str = CPU) -> None:
        self.name = name
        self.version = version
        self.device = device
        self.capabilities = Capabilities(name)
        self.provenance = Provenance()
        self._instruments: Instruments | None = None
        self._wrapped = False

    def prepare(self) -> Instruments:
        """Put kernels, probes and the helpers whose steps a length remembers into place.

        Raises:
            EnvironmentMissingError: the release lacks one that a replay cannot do without; it is
                said again each time.
        """
        if self._instruments is None:
            self._check()
            if not self._wrapped:
                self._wrap()
                self._wrapped = True
            self._instruments = Instruments(self.capabilities, self.provenance, self.device)
        return self._instruments

    def _check(self) -> None:
        capabilities = self.capabilities
        _ = capabilities.pad, capabilities.unpad, capabilities.scale, capabilities.dsa_class
        _ = capabilities.pad_lengths, capabilities.padding_mode, capabilities.runner_class

    def _wrap(self) -> None:
        capabilities, provenance = self.capabilities, self.provenance
        utils = capabilities.dsa_utils
        provenance.wrap_arithmetic([capabilities.batch_module, utils])
        provenance.wrap_mode(capabilities.padding_mode)
        provenance.wrap_sizes(capabilities.batch_class)
        provenance.wrap_padded_tokens(utils)


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
        self._driven = 0
        self._not_driven: Counter[str] = Counter()
        self._not_replayed: Counter[str] = Counter()
        self._reproduced = Reproduced()
        self._equal = 0
        # Most events meet the batch as the one before left it.
        self._rows: dict[int, tuple[Any, int]] = {}
        self._strings: dict[int, int] = {code: code for code in ABSENT_CODES}
        self._chains: dict[str, int] = {}
        self._chain_texts: dict[Chain, int] = {}

    def replay(self, processes: range | None = None) -> Recording:
        """Replay the processes, by default all; they are numbered from 0 in the result.

        Raises:
            PadtraceError: the release lacks a capability.
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
        # Equal inputs are driven once; what came of them is compared with each recorded outcome.
        results: dict[tuple[object, ...], Driven] = {}
        compared: dict[tuple[object, ...], Comparison] = {}
        comparer = Comparer()
        number = 0
        with Topology(capabilities, facts).active() as topology:
            builder = BatchBuilder(capabilities)
            driver = Driver(
                capabilities,
                topology,
                self._release.prepare(),
                self._launches,
                builder,
                deep_gemm=any(map(_has_deep_gemm, groups)),
            )
            graphs = GraphEvents(capabilities, topology, builder, self._release.provenance)
            for group in groups:
                key = driver.key(group)
                driven = results.get(key)
                if driven is None:
                    driven = results[key] = driver.drive(group)
                else:
                    self._equal += 1
                self._count(group, driven)
                if not driven.reason:
                    comparison = compared.get(group.key)
                    if comparison is None:
                        comparison = comparer.compare(group.events, driven.events)
                        compared[group.key] = comparison
                    self._reproduced.add(process, group.events, comparison)
                number = self._write(process, group, driven, graphs, number)
                done += 1
                if done % 64 == 0 or done == total:
                    self._progress(done, total)
        return done

    def _count(self, group: Group, driven: Driven) -> None:
        forwards = sum(event.kind == "forward" for event in group.events)
        if driven.reason:
            self._not_driven[driven.reason] += max(forwards, 1)
            self._not_replayed[f"not driven: {driven.reason}"] += max(forwards, 1)
        else:
            self._driven += sum(event.kind == "forward" for event in driven.events)

    def _write(
        self, process: int, group: Group, driven: Driven, graphs: GraphEvents, first: int
    ) -> int:
        """Write a batch's events; returns the next free number."""
        if driven.reason:
            others = [event for event in group.events if event.kind != "graph"]
            events = of_recorded(others or group.events, first)
        else:
            events = of_driven(driven.events, driven.chains, group.events, first)
        judged, skipped = graphs.judge(group, next_number(events, first))
        self._not_replayed.update(skipped)
        for event in (*events, *judged):
            self._add(process, event)
        return next_number((*events, *judged), first)

    def _add(self, process: int, event: ReplayedEvent) -> None:
        header = event.header
        strings = self._strings
        for place in _STRINGS_AT:
            known = strings.get(header[place])
            header[place] = self._string(header[place]) if known is None else known
        header[_PROCESS_AT] = process
        self._builder.add_encoded(event.kind, header, self._by_row(event.values))
        if event.chains and self._release.provenance.enabled:
            self._keep_chains(process, header[_ENTER_AT], event.chains)

    def _string(self, code: int) -> int:
        """The number of a recorded string in the new file, when it is first met."""
        text = self._recording.strings[code]
        found = self._strings[code] = self._builder.string_code(text)
        return found

    def _by_row(self, values: dict[str, Value]) -> dict[str, Value]:
        """Snapshots by their row in the new file; equal batches share them."""
        made = values
        for name in ("entry", "exit"):
            snapshot = values.get(name)
            if isinstance(snapshot, dict):
                kept = self._rows.get(id(snapshot))
                if kept is None:
                    # Kept with its row, so that its id is given to no other.
                    kept = (snapshot, self._builder.snapshot_row(snapshot))
                    self._rows[id(snapshot)] = kept
                if made is values:
                    made = dict(values)
                made[name] = kept[1]
        return made

    def _keep_chains(self, process: int, enter: int, chains: dict[str, Chain]) -> None:
        for column, chain in chains.items():
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
            "device": self._release.device,
            "recorded_on": about.get("sglang"),
            "of_source": about.get("source"),
            "notes": list(about.get("notes") or []),
        }

    def _coverage(self) -> dict[str, Any]:
        coverage = dict(self._recording.coverage)
        coverage["driven"] = {
            "driven": self._driven,
            "not_driven": dict(self._not_driven),
            "compared": self._reproduced.summary(),
        }
        coverage["replay"] = {
            "outside_edits": 0,
            "outside_edit_list": [],
            "not_replayed": dict(self._not_replayed),
            "equal_inputs": self._equal,
            "kernel": self._launches.summary(),
        }
        return coverage


def _has_deep_gemm(group: Group) -> bool:
    """A plan of the server had DeepGEMM's context lengths."""
    return any(
        event.kind == "plan" and event.integer("paged_mqa_ctx_lens_2d.rows") is not None
        for event in group.events
    )
