"""What the batches of one process share while it is replayed."""

from __future__ import annotations

from typing import Any

from padtrace.recording.facts import Facts
from padtrace.replay.worker.batches import BatchBuilder
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.context import Topology
from padtrace.replay.worker.graphs import GraphJudge
from padtrace.replay.worker.launches import LaunchJudge
from padtrace.replay.worker.planning import Planner
from padtrace.replay.worker.provenance import Provenance
from padtrace.replay.worker.runners import padding_runner
from padtrace.replay.worker.sharding import Sharding
from padtrace.replay.worker.snapshots import SnapshotTaker


class Site:
    """The release, one process's facts, and everything made from the two.

    Attributes:
        forced_plan: the recording was made with a plan on a side that was asked for.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        topology: Topology,
        provenance: Provenance,
        launches: LaunchJudge,
    ) -> None:
        facts: Facts = topology.facts
        server_args: Any = topology.server_args
        self.capabilities = capabilities
        self.provenance = provenance
        self.launches = launches
        self.builder = BatchBuilder(capabilities)
        self.snapshots = SnapshotTaker(capabilities.batch_class, facts.parallel.attn_cp_rank)
        self.planner = Planner(capabilities, facts, server_args, provenance)
        self.sharding = Sharding(capabilities, topology.cp_v2)
        self.graphs = GraphJudge(capabilities, facts, server_args)
        self.runners = {
            worker: padding_runner(facts, worker, server_args) for worker in ("target", "draft")
        }
        self.forced_plan = facts.case is not None and facts.case.plan in ("before", "after")
