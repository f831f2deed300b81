"""Replays the life of one batch: made, planned, padded, launched, unpadded, by SGLang's code."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from padtrace.errors import PadtraceError
from padtrace.recording import schema
from padtrace.recording.absent import Absent
from padtrace.recording.facts import Facts
from padtrace.recording.model import Event, Snapshot, Value
from padtrace.replay.worker import snapshots
from padtrace.replay.worker.batches import BatchBuilder, row_count, schedule_batch
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.edits import Edit, OutsideEdits, observed
from padtrace.replay.worker.graphs import GraphJudge
from padtrace.replay.worker.groups import Node
from padtrace.replay.worker.planning import Planner
from padtrace.replay.worker.provenance import Chain, Provenance, chain_of
from padtrace.replay.worker.runners import padding_runner
from padtrace.replay.worker.sharding import Sharding

_OWNER_LISTS = (
    "extend_seq_lens_cpu",
    "extend_prefix_lens_cpu",
    "extend_logprob_start_lens_cpu",
)
_PLANNED_MODES = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "EXTEND", "MIXED")


@dataclass(slots=True)
class Outcome:
    """One event of the replay: its own columns, and the recorded event it answers.

    Attributes:
        index: position of the recorded event in its group.
        chains: column name to the steps that made its value.
    """

    kind: str
    index: int
    values: dict[str, Value]
    chains: dict[str, Chain] = field(default_factory=dict)
    ended: bool = True


@dataclass(slots=True)
class LifeResult:
    """What one batch's replay gave."""

    outcomes: list[Outcome] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    not_replayed: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.not_replayed[reason] = self.not_replayed.get(reason, 0) + 1


class _Raised(Exception):
    """SGLang raised inside an event; the rest of the batch is not replayed."""


class Site:
    """What the batches of one process share while it is replayed."""

    def __init__(
        self,
        capabilities: Capabilities,
        facts: Facts,
        server_args: Any,
        provenance: Provenance,
        cp_v2: bool,
    ) -> None:
        self.capabilities = capabilities
        self.facts = facts
        self.provenance = provenance
        self.builder = BatchBuilder(capabilities)
        self.planner = Planner(capabilities, facts, server_args, provenance)
        self.sharding = Sharding(capabilities, cp_v2)
        self.graphs = GraphJudge(capabilities, facts, server_args)
        self.runners = {
            worker: padding_runner(facts, worker, server_args) for worker in ("target", "draft")
        }
        self.forced_plan = (facts.case or {}).get("plan") in ("before", "after")


class BatchLife:
    """One batch from its first event to its last."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._result = LifeResult()
        self._edits = OutsideEdits(site.builder)
        self._result.edits = self._edits.edits
        self._batch: Any = None
        self._schedule: Any = None
        self._scheduled: list[list[int]] = []
        self._padded = False
        self._plans: list[dict[str, Value]] = []
        self._pad_chain: Chain = ()
        self._plan_chain: Chain = ()
        self._lora_owner: list[Any] | None = None
        self._skipped: set[int] = set()
        self._wants_context_lens = True

    def run(self, roots: list[Node]) -> LifeResult:
        """Replay the events; SGLang's own errors become error events, ours leave."""
        try:
            for node in roots:
                self._visit(node)
            reason = ""
        except _Raised:
            reason = "an earlier event of the batch raised"
        done = {outcome.index for outcome in self._result.outcomes} | self._skipped
        for node in _flatten(roots):
            if node.index not in done and node.event.kind != "error":
                self._result.skip(reason or f"{node.event.kind}: where it is nested")
        return self._result

    def _skip(self, node: Node, reason: str) -> None:
        self._skipped.add(node.index)
        self._result.skip(reason)

    def _visit(self, node: Node) -> None:
        handler: dict[str, Callable[[Node], None]] = {
            "batch": self._made,
            "sync": self._sync,
            "forward": self._forward,
            "plan": self._plan,
            "ready": self._ready,
            "pad": self._pad,
            "graph": self._graph,
            "launch": self._launch,
            "unpad": self._unpad,
        }
        if node.event.kind in handler:
            self._site.provenance.forget()
            handler[node.event.kind](node)

    def _made(self, node: Node) -> None:
        snapshot = observed(node.event.snapshot("exit"))
        if snapshot is None:
            self._skip(node, "a batch that was never observed")
            raise _Raised
        self._build(snapshot)
        for child in node.children:
            self._visit(child)
        self._edits.after(snapshot)
        values: dict[str, Value] = {
            "function": node.event["function"],
            "exit": self._take(),
        }
        self._add("batch", node, values)

    def _build(self, snapshot: Snapshot) -> None:
        self._batch = self._site.builder.build(snapshot)
        lora = self._batch.lora_ids
        shared = self._site.capabilities.lora_list_is_shared
        self._lora_owner = lora if shared else None

    def _need_batch(self, node: Node) -> None:
        """A batch whose making was not recorded is rebuilt from the first look at it."""
        if self._batch is None:
            snapshot = observed(node.event.snapshot("entry"))
            if snapshot is None:
                self._skip(node, "a batch that was never observed")
                raise _Raised
            self._build(snapshot)
            self._edits.after(snapshot)

    def _sync(self, node: Node) -> None:
        if self._batch is None:
            self._skip(node, "a batch that was never observed")
            raise _Raised
        batch = self._batch
        batch.global_num_tokens_cpu = batch.global_num_tokens_gpu = None
        batch.original_global_num_tokens_cpu = batch.global_num_tokens_for_logprob_cpu = None
        self._schedule = schedule_batch(node.event.values, batch, self._lora_owner)
        lists = (self._schedule.global_num_tokens, self._schedule.draft_global_num_tokens)
        self._scheduled = [counts for counts in lists if counts is not None]
        before = [list(counts) for counts in self._scheduled]
        draft = node.event.text("worker") == "draft"
        function = self._call(
            node,
            "init_mlp_sync_metadata",
            self._site.capabilities.scale,
            batch,
            self._schedule,
            draft,
        )
        aliases = any(batch.global_num_tokens_cpu is counts for counts in self._scheduled)
        after = batch.global_num_tokens_cpu
        source = batch.original_global_num_tokens_cpu
        if after is not None and source is not None and not aliases:
            width = getattr(batch.spec_info, "num_tokens_per_req", None)
            after[:] = self._site.provenance.scaled(source, after, width)
        values: dict[str, Value] = {
            "function": function,
            "counts_before": before[0] if before else None,
            "counts_after": _copied(after),
            "logprob_counts_before": _copied(self._schedule.global_num_tokens_for_logprob),
            "logprob_counts_after": _copied(batch.global_num_tokens_for_logprob_cpu),
            "original_counts": _copied(source),
            "draft_counts_before": _copied(self._schedule.draft_global_num_tokens),
            "aliases_scheduler_list": int(aliases),
            "can_run_dp_cuda_graph": node.event["can_run_dp_cuda_graph"],
        }
        self._add("sync", node, values)

    def _forward(self, node: Node) -> None:
        self._need_batch(node)
        self._edits.before(self._batch, observed(node.event.snapshot("entry")), node.index)
        values: dict[str, Value] = {
            "entry": self._take(),
            "forward_mode": self._batch.forward_mode.name,
            "can_run_graph": node.event["can_run_graph"],
            "failed": 0,
        }
        outcome = self._add("forward", node, values)
        self._padded = False
        try:
            for child in node.children:
                self._visit(child)
        except _Raised:
            outcome.values["failed"], outcome.ended = 1, False
            raise

    def _ready(self, node: Node) -> None:
        self._need_batch(node)
        equivalent = node.event.integer("replan_equivalent")
        mark = getattr(self._batch, "mark_forward_metadata_ready", None)
        if mark is None:
            values: dict[str, Value] = {
                name: Absent.NO_ATTRIBUTE
                for name in ("replan_equivalent", "planned_bs", "planned_num_tokens")
            }
        else:
            before = self._take()
            mark(replan_equivalent=bool(equivalent))
            self._edits.after_unobserved(_changes(before, self._take()))
            values = {
                "replan_equivalent": equivalent,
                "planned_bs": self._batch.forward_metadata_planned_bs,
                "planned_num_tokens": self._batch.forward_metadata_planned_num_tokens,
            }
        self._add("ready", node, values)

    def _pad(self, node: Node) -> None:
        self._need_batch(node)
        batch, site = self._batch, self._site
        self._edits.before(batch, observed(node.event.snapshot("entry")), node.index)
        entry = self._take()
        owners = {name: getattr(batch, name, None) for name in _OWNER_LISTS}
        scheduled = [list(counts) for counts in self._scheduled]
        runner = site.runners[node.event.text("worker") or "target"]
        function = node.event.text("function") or "prepare_mlp_sync_batch"
        outcome = self._add("pad", node, {"function": function, "entry": entry})
        if function == "_pad_inputs_to_size":
            sizes = node.event.integer("num_tokens"), node.event.integer("bs")
            self._run(outcome, node, function, batch._pad_inputs_to_size, runner, *sizes)
        else:
            self._run(outcome, node, function, site.capabilities.pad, batch, runner)
        after = self._take()
        num_tokens, bs = site.provenance.sizes[0] if site.provenance.sizes else (None, None)
        outcome.values.update(
            {
                "exit": after,
                "num_tokens": None if num_tokens is None else int(num_tokens),
                "bs": None if bs is None else int(bs),
                "scheduler_list_changed": int(scheduled != [list(c) for c in self._scheduled]),
                **{f"owner.{name}.rows": row_count(owner) for name, owner in owners.items()},
                "owner.lora_ids.rows": row_count(self._lora_owner)
                if self._lora_owner is not None
                else Absent.NO_ATTRIBUTE,
            }
        )
        if num_tokens is not None:
            outcome.chains["input_ids.rows"] = site.provenance.rows_chain(num_tokens, num_tokens)
            self._pad_chain = outcome.chains["input_ids.rows"]
        self._padded = True
        self._nested_pads(node)
        self._edits.after(observed(node.event.snapshot("exit")))

    def _nested_pads(self, node: Node) -> None:
        """`_pad_inputs_to_size` within the pad: the same call, seen once more."""
        calls = self._site.provenance.sizes
        for child, (num_tokens, bs) in zip(node.children, calls, strict=False):
            if child.event.kind == "pad":
                values: dict[str, Value] = {
                    "function": child.event["function"],
                    "num_tokens": int(num_tokens),
                    "bs": int(bs),
                    "exit": self._take(),
                }
                self._add("pad", child, values)

    def _plan(self, node: Node) -> None:
        self._need_batch(node)
        batch, site = self._batch, self._site
        self._edits.before(batch, observed(node.event.snapshot("entry")), node.index)
        function = node.event.text("function") or ""
        reason = self._no_plan(node, function)
        if reason is not None:
            self._skip(node, reason)
            return
        outcome = self._add("plan", node, {"function": function, "entry": self._take()})
        outcome.values["backend"] = node.event["backend"]
        outcome.values["backend_id"] = node.event["backend_id"]
        if _is_wrapper(node):
            self._plans = []
            for child in node.children:
                self._visit(child)
            return
        worker = node.event.text("worker") or "target"
        # The backend makes them only on CUDA; where the server had none, neither has the replay.
        self._wants_context_lens = node.event["paged_mqa_ctx_lens_2d.rows"] is not None
        if function.startswith("pad_"):
            self._run(outcome, node, function, self._plan_alone, outcome)
        else:
            self._run(
                outcome, node, function, self._plan_backend, outcome, worker, _backend_id(node)
            )
        self._remember_plan(node, outcome)
        self._edits.after_unobserved(_changes(outcome.values["entry"], self._take()))

    def _no_plan(self, node: Node, function: str) -> str | None:
        """Why this plan is not replayed, if it is not."""
        backend = node.event.text("backend") or ""
        if function.startswith("pad_"):
            return None
        if "SparseAttn" not in backend:
            return f"plan: {backend or 'an unnamed backend'} is not rebuilt"
        if function != "init_forward_metadata":
            return f"plan: {function} needs a captured graph"
        empty = int(self._batch.batch_size) == 0
        if empty and self._batch.forward_mode.name == "IDLE" and not self._site.forced_plan:
            return "plan: SGLang's runners plan no empty batch"
        return None

    def _plan_alone(self, outcome: Outcome) -> None:
        """The pad function of the metadata without a backend, where none is wanted."""
        sharding = self._site.sharding
        sharding.prepare(self._batch)
        outcome.values.update(self._site.planner.pad_lengths(self._batch, sharding.lengths))

    def _plan_backend(self, outcome: Outcome, worker: str, backend_id: int) -> None:
        if self._padded:
            self._site.sharding.prepare(self._batch)
        build = self._wants_context_lens
        outcome.values.update(self._site.planner.plan(self._batch, worker, backend_id, build))

    def _remember_plan(self, node: Node, outcome: Outcome) -> None:
        provenance = self._site.provenance
        planned = outcome.values.get("planned.rows")
        if isinstance(planned, int):
            base = provenance.padded_tokens
            unpadded = outcome.values.get("dsa_seqlens_expanded.rows")
            if base is None or int(base) != planned:
                chain = chain_of(unpadded if isinstance(unpadded, int) else planned)
            else:
                chain = provenance.rows_chain(planned, base)
            when = "after" if self._padded else "before"
            chain = (*chain, f"planned {when} the pad -> {planned}")
            outcome.chains["planned.rows"] = chain
            splits = outcome.values["num_splits.rows"]
            self._plan_chain = (*chain, f"num_splits: rows + 1 -> {splits}")
            outcome.chains["num_splits.rows"] = self._plan_chain
        parent_is_wrapper = node.event.integer("parent") is not None and self._plans
        self._plans = [*self._plans, outcome.values] if parent_is_wrapper else [outcome.values]
        calls = iter(provenance.planned)
        for child in node.children:
            self._nested_in_plan(child, calls)

    def _nested_in_plan(self, child: Node, calls: Iterator[tuple[int, int]]) -> None:
        """What the hooks saw within a plan: the metadata method, or the kernel it calls."""
        rows, splits = next(calls, (Absent.NOT_OBSERVED, Absent.NOT_OBSERVED))
        event = child.event
        if event.kind == "launch" and event.text("function") == "get_mla_metadata":
            values = dict(event.values)
            for name in _HEADER:
                values.pop(name, None)
            values.update({"cache_seqlens.rows": rows, "num_splits.rows": splits})
            self._add("launch", child, values)
        elif event.kind == "plan":
            names = ("backend", "backend_id", "function")
            values = {name: event[name] for name in names}
            values.update({"planned.rows": rows, "num_splits.rows": splits})
            self._add("plan", child, values)
            for inner in child.children:
                self._nested_in_plan(inner, iter([(rows, splits)]))  # type: ignore[list-item]

    def _graph(self, node: Node) -> None:
        self._need_batch(node)
        self._edits.before(self._batch, observed(node.event.snapshot("entry")), node.index)
        reason = self._site.graphs.unable(node.event, self._batch)
        if reason is not None:
            self._skip(node, reason)
            return
        outcome = self._add("graph", node, {"entry": self._take()})
        judge = self._site.graphs.judge
        outcome.values.update(
            self._run(
                outcome, node, node.event.text("function") or "", judge, node.event, self._batch
            )
        )

    def _launch(self, node: Node) -> None:
        self._need_batch(node)
        event = node.event
        if not (event.text("function") or "").startswith("flash_mla"):
            self._skip(node, f"launch: {event.text('function')} is not replayed")
            return
        if not self._padded:
            self._site.sharding.prepare(self._batch)
        rows = self._site.sharding.query_rows(self._batch)
        plan = self._plan_of(event)
        recorded = event.vector("q.shape")
        rest = (
            recorded[1:] if recorded else self._site.planner.head_shape(event.text("worker") or "")
        )
        values: dict[str, Value] = {
            name: value for name, value in event.values.items() if name in _LAUNCH_COPIED
        }
        values.update({"q.shape": [rows, *rest], "failed": Absent.NOT_OBSERVED})
        if plan is not None:
            values["num_splits.rows"] = plan.get("num_splits.rows", Absent.NOT_OBSERVED)
            values["cache_seqlens.rows"] = plan.get("planned.rows", Absent.NOT_OBSERVED)
        outcome = self._add("launch", node, values)
        outcome.chains["q.rows"] = self._query_chain(rows)
        if plan is not None and self._plan_chain:
            outcome.chains["num_splits.rows"] = self._plan_chain

    def _query_chain(self, rows: int) -> Chain:
        tokens = int(self._batch.input_ids.shape[0])
        chain = self._pad_chain or chain_of(tokens)
        return chain if tokens == rows else (*chain, f"context-parallel shard -> {rows}")

    def _plan_of(self, event: Event) -> dict[str, Value] | None:
        """The metadata this launch reads: of its draft step where a wrapper planned several."""
        if not self._plans:
            return None
        step = event.integer("draft_step") or 0
        return self._plans[step] if step < len(self._plans) else self._plans[-1]

    def _unpad(self, node: Node) -> None:
        self._need_batch(node)
        batch, event = self._batch, node.event
        self._edits.before(batch, observed(event.snapshot("entry")), node.index)
        entry = self._take()
        logits_rows = self._output_rows(event, "logits_before.rows")
        hidden_rows = self._output_rows(event, "hidden_states_before.rows")
        output = self._site.capabilities.logits_class(
            next_token_logits=_zeros(logits_rows), hidden_states=_zeros(hidden_rows)
        )
        outcome = self._add(
            "unpad",
            node,
            {
                "entry": entry,
                "logits_before.rows": logits_rows,
                "hidden_states_before.rows": hidden_rows,
            },
        )
        unpad = self._site.capabilities.unpad
        self._run(outcome, node, "post_forward_mlp_sync_batch", unpad, batch, output)
        outcome.values.update(
            {
                "exit": self._take(),
                "logits_after.rows": row_count(output.next_token_logits),
                "hidden_states_after.rows": row_count(output.hidden_states),
            }
        )
        self._padded = False
        self._edits.after(observed(event.snapshot("exit")))

    def _output_rows(self, event: Event, column: str) -> int | None:
        """Rows of the model's output: recorded, moved along with the padded rows."""
        value = event[column]
        if value is None:
            return None
        tokens, requests = int(self._batch.input_ids.shape[0]), int(self._batch.batch_size)
        recorded = observed(event.snapshot("entry"))
        if isinstance(value, int):
            was_tokens = recorded.get("input_ids.rows") if recorded else None
            was_requests = recorded.get("batch_size") if recorded else None
            if value == was_tokens:
                return tokens
            return requests if value == was_requests else value
        extends = self._batch.forward_mode.name in ("EXTEND", "MIXED")
        return requests if extends else tokens

    def _run(
        self, outcome: Outcome, node: Node, name: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Call SGLang; an exception of its own ends `outcome` and the batch."""
        try:
            return function(*args)
        except PadtraceError:
            raise
        except Exception as error:
            outcome.ended = False
            self._add("error", node, _error_values(name, error)).ended = False
            raise _Raised from None

    def _call(self, node: Node, name: str, function: Callable[..., Any], *args: Any) -> Any:
        outcome = Outcome(node.event.kind, node.index, {})
        try:
            return self._run(outcome, node, name, function, *args)
        except _Raised:
            self._result.outcomes.insert(-1, outcome)
            raise

    def _add(self, kind: str, node: Node, values: dict[str, Value]) -> Outcome:
        outcome = Outcome(kind, node.index, values)
        self._result.outcomes.append(outcome)
        return outcome

    def _take(self) -> Snapshot:
        return snapshots.take(self._batch, self._site.facts.parallel.attn_cp_rank)


_LAUNCH_COPIED = (
    "function",
    "q.dtype",
    "k_cache.dtype",
    "head_dim_v",
    "is_fp8_kvcache",
    "count",
    "k_cache.shape",
    "tile_scheduler_metadata.rows",
)
_HEADER = tuple(column.name for column in schema.HEADER)


def _flatten(nodes: list[Node]) -> list[Node]:
    return [found for node in nodes for found in (node, *_flatten(node.children))]


def _is_wrapper(node: Node) -> bool:
    return "MultiStep" in (node.event.text("backend") or "")


def _backend_id(node: Node) -> int:
    return node.event.integer("backend_id") or 0


def _copied(counts: Any) -> list[int] | None:
    return None if counts is None else [int(count) for count in counts]


def _zeros(count: int | None) -> Any:
    return None if count is None else torch.zeros((count, 1))


def _changes(before: Value, after: Snapshot) -> Snapshot:
    assert isinstance(before, dict)
    return {name: value for name, value in after.items() if before.get(name) != value}


def _error_values(function: str, error: Exception) -> dict[str, Value]:
    frames = [
        f"sglang/{frame.filename.replace(chr(92), '/').rsplit('/sglang/', 1)[1]}:{frame.lineno}"
        f" {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/sglang/" in frame.filename.replace("\\", "/")
    ]
    text = (str(error).splitlines() or [""])[0]
    return {
        "function": function,
        "type": type(error).__name__,
        "message": text[:500],
        "frames": frames[-8:],
    }
