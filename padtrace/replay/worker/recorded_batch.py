"""One recorded batch as SGLang's own path is given it: what `init_new` answers, and the schedule.

`ForwardBatch.init_new` needs requests, a sampler and a cache. Here it answers once with the batch
that was recorded when it returned, its counts scaled by the release; a second call in one drive is
a batch that was not recorded, and is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from padtrace.recording.model import Snapshot
from padtrace.replay.worker.batches import SCHEDULED, BatchBuilder, schedule_values
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.events import RecordedEvent
from padtrace.replay.worker.groups import Group
from padtrace.replay.worker.not_driven import NotDrivenError
from padtrace.replay.worker.provenance import Provenance
from padtrace.replay.worker.standins import StandIn, Unobserved


class RecordedBatch:
    """What is known of a batch before SGLang's path begins.

    Attributes:
        worker: "target" or "draft".
        made: the batch, once SGLang has asked for it.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        builder: BatchBuilder,
        provenance: Provenance,
        snapshot: Snapshot,
        sync: RecordedEvent | None,
        worker: str,
    ) -> None:
        self._capabilities = capabilities
        self._builder = builder
        self._provenance = provenance
        self.snapshot = snapshot
        self._sync = sync
        self.worker = worker
        self.made: Any = None
        if isinstance(builder.spec_info(snapshot), Unobserved):
            raise NotDrivenError("the speculative input was not observed")

    @property
    def mode(self) -> str:
        return str(self.snapshot["forward_mode"])

    @property
    def batch_size(self) -> int:
        return self.integer("batch_size")

    def integer(self, column: str) -> int:
        """A number of the snapshot that the path cannot do without."""
        value = self.snapshot.get(column)
        if not isinstance(value, int):
            raise NotDrivenError(f"{column} was not observed")
        return value

    def spec_info(self) -> Any:
        """The speculative input as the scheduler would hand it over."""
        return self._builder.spec_info(self.snapshot)

    def schedule(self, runner: Any, **more: Any) -> StandIn:
        """The scheduler's batch: what the drafts and `init_new` read of it."""
        lengths = self._builder.lengths(self.snapshot)
        size = self.batch_size
        seq_lens = torch.tensor(lengths[:size], dtype=torch.int64)
        values: dict[str, Any] = {
            "forward_mode": self._builder.mode(self.snapshot["forward_mode"]),
            "seq_lens": seq_lens,
            "seq_lens_cpu": seq_lens.clone(),
            "seq_lens_sum": int(seq_lens.sum()),
            "input_ids": torch.zeros(self._tokens(), dtype=torch.int64),
            "req_pool_indices": torch.zeros(size, dtype=torch.int64),
            "model_config": runner.model_config,
            "device": "cpu",
            "sampling_info": None,
            "reqs": [],
            "out_cache_loc": None,
            "token_to_kv_pool_allocator": StandIn("KV allocator", {"page_size": runner.page_size}),
            **schedule_values(self._sync, self.snapshot),
        }
        known = self._capabilities.schedule_fields
        absent = [name for name in SCHEDULED if name not in known]
        for name in absent:
            values.pop(name, None)
        return StandIn("ScheduleBatch", {**values, **more}, absent=absent)

    def _tokens(self) -> int:
        """Rows of input_ids; a draft's first are the tokens of its requests."""
        rows = self.snapshot.get("input_ids.rows")
        return rows if isinstance(rows, int) else self.batch_size

    def make(self, schedule: Any, runner: Any, options: dict[str, Any]) -> Any:
        """What `init_new(schedule, runner, ...)` answers."""
        if self.made is not None:
            raise NotDrivenError("SGLang makes a batch that was not recorded")
        batch = self.made = self._builder.build(self.snapshot)
        # What the path itself has put into the scheduler's batch, init_new hands on.
        if schedule.spec_info is not None:
            batch.spec_info = schedule.spec_info
        else:
            schedule.spec_info = batch.spec_info
        if schedule.out_cache_loc is not None:
            batch.out_cache_loc = schedule.out_cache_loc
        for name in ("req_to_token_pool", "token_to_kv_pool", "attn_backend"):
            if hasattr(batch, name):
                setattr(batch, name, getattr(runner, name))
        self._capture_mode(batch, runner, options)
        if self._sync is not None:
            self.scale(batch, schedule)
        return batch

    def _capture_mode(self, batch: Any, runner: Any, options: dict[str, Any]) -> None:
        modes = self._capabilities.capture_hidden_mode
        mode = options.get("capture_hidden_mode")
        if mode is None:
            mode = getattr(batch.spec_info, "capture_hidden_mode", None)
        if mode is None:
            # A verify and a prefill that a draft follows hand all rows on.
            mode = modes.NULL if runner.spec_algorithm.is_none() else modes.FULL
        batch.capture_hidden_mode = mode

    def scale(self, batch: Any, schedule: Any) -> None:
        """Fill in the counts of the ranks by the release's own function."""
        batch.global_num_tokens_cpu = batch.global_num_tokens_gpu = None
        batch.original_global_num_tokens_cpu = batch.global_num_tokens_for_logprob_cpu = None
        self._capabilities.scale(batch, schedule, self.worker == "draft")
        after, source = batch.global_num_tokens_cpu, batch.original_global_num_tokens_cpu
        names = ("global_num_tokens", "draft_global_num_tokens")
        lists = [vars(schedule).get(name) for name in names]
        aliases = any(after is counts for counts in lists)
        if after is not None and source is not None and not aliases:
            width = getattr(batch.spec_info, "num_tokens_per_req", None)
            after[:] = self._provenance.scaled(source, after, width)


def scaled_batch(
    capabilities: Capabilities, builder: BatchBuilder, provenance: Provenance, group: Group
) -> Any:
    """The batch of a group as it was handed on, its counts scaled; None where it was not seen."""
    made = next((event for event in group.events if event.kind == "batch"), None)
    snapshot = None if made is None else made.snapshot("exit")
    if snapshot is None:
        return None
    sync = next((event for event in group.events if event.kind == "sync"), None)
    worker = group.events[0].text("worker") or "target"
    recorded = RecordedBatch(capabilities, builder, provenance, snapshot, sync, worker)
    batch = builder.build(snapshot)
    if sync is not None:
        schedule = StandIn(
            "ScheduleBatch", {**schedule_values(sync, snapshot), "spec_info": batch.spec_info}
        )
        recorded.scale(batch, schedule)
    return batch
