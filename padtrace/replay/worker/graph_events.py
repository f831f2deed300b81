"""Graph runners: each recorded decision is made again, on the batch as the runner met it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from padtrace.errors import PadtraceError
from padtrace.replay.worker.batches import BatchBuilder
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.context import Topology
from padtrace.replay.worker.errors import error_values
from padtrace.replay.worker.events import HEADER, RecordedEvent
from padtrace.replay.worker.graphs import GraphJudge
from padtrace.replay.worker.groups import Group
from padtrace.replay.worker.provenance import Provenance
from padtrace.replay.worker.recorded_batch import scaled_batch
from padtrace.replay.worker.replayed_events import ReplayedEvent
from padtrace.replay.worker.snapshots import SnapshotTaker

_ENTER, _EXIT, _PARENT = (HEADER.index(name) for name in ("enter_seq", "exit_seq", "parent"))


class GraphEvents:
    """Judges the graph events of one process."""

    def __init__(
        self,
        capabilities: Capabilities,
        topology: Topology,
        builder: BatchBuilder,
        provenance: Provenance,
    ) -> None:
        facts = topology.facts
        self._capabilities = capabilities
        self._builder = builder
        self._provenance = provenance
        self._judge = GraphJudge(capabilities, facts, topology.server_args)
        self._snapshots = SnapshotTaker(capabilities.batch_class, facts.parallel.attn_cp_rank)

    def judge(self, group: Group, first: int) -> tuple[list[ReplayedEvent], Counter[str]]:
        """The graph events of a batch, numbered from `first`, and why some are left out."""
        made: list[ReplayedEvent] = []
        skipped: Counter[str] = Counter()
        for event in group.events:
            if event.kind != "graph":
                continue
            batch = self._batch(event, group)
            reason = (
                "graph: a batch that was never observed"
                if batch is None
                else self._judge.unable(event, batch)
            )
            if reason is not None:
                skipped[reason] += 1
                continue
            made += self._one(event, batch, first)
            first = made[-1].header[_ENTER] + 2
        return made, skipped

    def _batch(self, event: RecordedEvent, group: Group) -> Any:
        """The batch as the event met it; a made one as it was handed on."""
        snapshot = event.snapshot("entry")
        if snapshot is not None:
            return self._builder.build(snapshot)
        return scaled_batch(self._capabilities, self._builder, self._provenance, group)

    def _one(self, event: RecordedEvent, batch: Any, first: int) -> list[ReplayedEvent]:
        header = event.header_codes()
        header[_ENTER], header[_EXIT] = first, first + 1
        values: dict[str, Any] = {"entry": self._snapshots.take(batch)}
        graph = ReplayedEvent("graph", header, values)
        try:
            values.update(self._judge.judge(event, batch))
        except PadtraceError:
            raise
        except Exception as error:
            told = error_values(event.text("function") or "", error)
            inner = list(header)
            inner[_ENTER], inner[_EXIT], inner[_PARENT] = first + 1, first + 2, first
            return [graph, ReplayedEvent("error", inner, told)]
        return [graph]
