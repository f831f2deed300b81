"""The plans of a batch, and the launches that read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from padtrace.recording.absent import Absent
from padtrace.recording.model import Value
from padtrace.replay.worker.edits import changes
from padtrace.replay.worker.events import RecordedEvent
from padtrace.replay.worker.groups import Node
from padtrace.replay.worker.outcomes import BatchEndedError, Outcome
from padtrace.replay.worker.provenance import Chain, chain_of

if TYPE_CHECKING:
    from padtrace.replay.worker.life import BatchLife

# Of a recorded launch, what says which call it was; no padding decision makes these.
_COPIED = (
    *("function", "q.dtype", "k_cache.shape", "k_cache.dtype", "head_dim_v", "is_fp8_kvcache"),
    *("tile_scheduler_metadata.rows", "count"),
)
_Call = tuple[Value, Value]


class Plans:
    """Runs the backend's planning, and says what each launch would be called with."""

    def __init__(self, life: BatchLife) -> None:
        self._life = life
        # Of the last plan: one entry, or one per draft step where a wrapper planned them all.
        self._planned: list[dict[str, Value]] = []
        self._in_wrapper = False
        self._chain: Chain = ()

    def plan(self, node: Node) -> None:
        life = self._life
        life.enter(node)
        function = node.event.text("function") or ""
        reason = self._no_plan(node, function)
        if reason is not None:
            life.skip(node, reason)
            return
        self._shard_as_recorded(node)
        values: dict[str, Value] = {
            "entry": life.take(),
            **{name: node.event[name] for name in ("backend", "backend_id", "function")},
        }
        outcome = life.add("plan", node, values)
        if "MultiStep" in (node.event.text("backend") or ""):
            self._wrapper(node)
            return
        run = self._alone if function.startswith("pad_") else self._backend
        life.call(outcome, node, function, run, outcome, node.event)
        self._remember(outcome)
        self._nested(node)
        life.edits.after_unobserved(changes(outcome.values["entry"], life.take()))

    def _shard_as_recorded(self, node: Node) -> None:
        """Prepare context parallelism where the server's runner had done it before the plan."""
        entry, batch = node.event.snapshot("entry"), self._life.batch
        recorded = None if entry is None else entry["attn_cp_metadata.rows"]
        if isinstance(recorded, int) and batch.attn_cp_metadata is None:
            self._life.site.sharding.prepare(batch)
            self._life.touched()

    def _no_plan(self, node: Node, function: str) -> str | None:
        """Why this plan is not replayed, if it is not."""
        backend = node.event.text("backend") or ""
        if function.startswith("pad_"):
            return None
        if "SparseAttn" not in backend:
            return f"plan: {backend or 'an unnamed backend'} is not rebuilt"
        if function != "init_forward_metadata":
            return f"plan: {function} needs a captured graph"
        batch = self._life.batch
        idle = int(batch.batch_size) == 0 and batch.forward_mode.name == "IDLE"
        if idle and not self._life.site.forced_plan:
            return "plan: SGLang's runners plan no empty batch"
        return None

    def _wrapper(self, node: Node) -> None:
        """A multi-step draft plans with one backend per step; those are the nested events."""
        self._planned, self._in_wrapper = [], True
        try:
            for child in node.children:
                self._life.visit(child)
        finally:
            self._in_wrapper = False

    def _alone(self, outcome: Outcome, event: RecordedEvent) -> None:
        """The pad function of the metadata without a backend, where none is wanted."""
        site, batch = self._life.site, self._life.batch
        site.sharding.prepare(batch)
        outcome.values.update(site.planner.pad_lengths(batch, site.sharding.lengths))

    def _backend(self, outcome: Outcome, event: RecordedEvent) -> None:
        site, batch = self._life.site, self._life.batch
        if self._life.padded:
            site.sharding.prepare(batch)
        worker = event.text("worker") or "target"
        # The backend makes them only on CUDA; where the server had none, neither has the replay.
        context_lens = event["paged_mqa_ctx_lens_2d.rows"] is not None
        made = site.planner.plan(batch, worker, event.integer("backend_id") or 0, context_lens)
        outcome.values.update(made)

    def _remember(self, outcome: Outcome) -> None:
        self._planned = [*self._planned, outcome.values] if self._in_wrapper else [outcome.values]
        rows, splits = outcome.values["planned.rows"], outcome.values["num_splits.rows"]
        if not isinstance(rows, int):
            return
        provenance = self._life.site.provenance
        tokens = provenance.padded_tokens
        if tokens is None or int(tokens) != rows:
            unpadded = outcome.values["dsa_seqlens_expanded.rows"]
            chain = chain_of(unpadded if isinstance(unpadded, int) else rows)
        else:
            chain = provenance.rows_chain(rows, tokens)
        when = "after" if self._life.padded else "before"
        chain = (*chain, f"planned {when} the pad -> {rows}")
        self._chain = (*chain, f"num_splits: rows + 1 -> {splits}")
        outcome.chains["planned.rows"] = chain
        outcome.chains["num_splits.rows"] = self._chain

    def _nested(self, node: Node) -> None:
        """What the hooks saw within a plan: the metadata method, and the kernel it calls."""
        calls: Iterator[_Call] = iter(self._life.site.provenance.planned)
        for child in node.children:
            call = next(calls, (Absent.NOT_OBSERVED, Absent.NOT_OBSERVED))
            self._metadata_call(child, call)
            for inner in child.children:
                self._metadata_call(inner, call)

    def _metadata_call(self, node: Node, call: _Call) -> None:
        rows, splits = call
        event = node.event
        if event.kind == "launch" and event.text("function") == "get_mla_metadata":
            values = event.own()
            values.update({"cache_seqlens.rows": rows, "num_splits.rows": splits})
            self._life.add("launch", node, values)
        elif event.kind == "plan":
            values = {name: event[name] for name in ("backend", "backend_id", "function")}
            values.update({"planned.rows": rows, "num_splits.rows": splits})
            self._life.add("plan", node, values)

    def launch(self, node: Node) -> None:
        life, event = self._life, node.event
        life.enter_without_look(node)
        function = event.text("function") or "an unnamed kernel"
        if not function.startswith("flash_mla"):
            life.skip(node, f"launch: {function} is not replayed")
            return
        rows = life.site.sharding.query_rows(life.batch)
        if rows == 0:
            life.skip(node, "launch: SGLang calls no attention without rows")
            return
        recorded = event.vector("q.shape")
        worker = event.text("worker") or "target"
        rest = recorded[1:] if recorded else life.site.planner.head_shape(worker)
        values: dict[str, Value] = {name: event[name] for name in _COPIED}
        values["q.shape"] = [rows, *rest]
        plan = self._plan_of(event)
        if plan is not None:
            values["num_splits.rows"] = plan["num_splits.rows"]
            values["cache_seqlens.rows"] = plan["planned.rows"]
        outcome = life.add("launch", node, values)
        outcome.chains["q.rows"] = self._query_chain(rows)
        if plan is not None and self._chain:
            outcome.chains["num_splits.rows"] = self._chain
        self._ask_kernel(node, outcome)

    def _ask_kernel(self, node: Node, outcome: Outcome) -> None:
        """Whether the kernel takes the launch; a refusal ends the batch, as it ends a server."""
        asked = {"indices.shape": node.event["indices.shape"], **outcome.values}
        result = self._life.site.launches.judge(asked)
        if result is None or result.outcome not in ("pass", "refused"):
            return
        outcome.values["failed"] = int(result.outcome == "refused")
        if result.outcome == "refused":
            outcome.ended = False
            values: dict[str, Value] = {
                "function": outcome.values["function"],
                "type": "RuntimeError",
                "message": result.error,
            }
            self._life.add("error", node, values).ended = False
            raise BatchEndedError

    def _plan_of(self, event: RecordedEvent) -> dict[str, Value] | None:
        """The metadata this launch reads: of its draft step where a wrapper planned several."""
        if not self._planned:
            return None
        step = event.integer("draft_step") or 0
        return self._planned[step] if step < len(self._planned) else self._planned[-1]

    def _query_chain(self, rows: int) -> Chain:
        tokens = int(self._life.batch.input_ids.shape[0])
        chain = self._life.pad_chain or chain_of(tokens)
        return chain if tokens == rows else (*chain, f"context-parallel shard -> {rows}")
