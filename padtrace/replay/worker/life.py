"""Replays the life of one batch: made, planned, padded, launched, unpadded, by SGLang's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from padtrace.errors import PadtraceError
from padtrace.recording.absent import Absent
from padtrace.recording.model import Snapshot, Value
from padtrace.replay.worker.batches import schedule_batch
from padtrace.replay.worker.edits import OutsideEdits
from padtrace.replay.worker.groups import Node
from padtrace.replay.worker.outcomes import BatchEndedError, LifeResult, Outcome, error_values
from padtrace.replay.worker.pads import Pads
from padtrace.replay.worker.plans import Plans
from padtrace.replay.worker.provenance import Chain
from padtrace.replay.worker.site import Site

_READY = ("replan_equivalent", "planned_bs", "planned_num_tokens")


class BatchLife:
    """One batch from its first event to its last.

    Attributes:
        batch: the real ForwardBatch, once it is made.
        scheduled: the count lists the scheduler owns, which a pad must not edit.
        lora_owner: the scheduler's lora list, where the release shares it with the batch.
        padded: whether the forward that runs now has padded already.
        pad_chain: how the padded token rows came about.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.edits = OutsideEdits(site.builder)
        self.batch: Any = None
        self.scheduled: list[list[int]] = []
        self.lora_owner: list[Any] | None = None
        self.padded = False
        self.pad_chain: Chain = ()
        self._seen: Snapshot | None = None
        self._result = LifeResult(edits=self.edits.edits)
        self._skipped: set[int] = set()
        pads, plans = Pads(self), Plans(self)
        self._handlers: dict[str, Callable[[Node], None]] = {
            "batch": self._made,
            "sync": self._sync,
            "forward": self._forward,
            "ready": self._ready,
            "graph": self._graph,
            "plan": plans.plan,
            "launch": plans.launch,
            "pad": pads.pad,
            "unpad": pads.unpad,
        }

    def run(self, roots: list[Node]) -> LifeResult:
        """Replay the events; SGLang's own errors become error events, ours leave."""
        reason = ""
        try:
            for node in roots:
                self.visit(node)
        except BatchEndedError:
            reason = "an earlier event of the batch raised"
        self._count_undone(roots, reason)
        # The handlers refer back to this object; without them it goes when its batch is done.
        self._handlers.clear()
        return self._result

    def _count_undone(self, nodes: list[Node], reason: str) -> None:
        """Count the events that nothing was done about."""
        done = {outcome.index for outcome in self._result.outcomes} | self._skipped
        waiting = nodes[::-1]
        while waiting:
            node = waiting.pop()
            if node.index not in done and node.event.kind != "error":
                self._result.skip(reason or f"{node.event.kind}: where it is nested")
            waiting += reversed(node.children)

    def visit(self, node: Node) -> None:
        """Replay one event and what is nested in it."""
        handler = self._handlers.get(node.event.kind)
        if handler is not None:
            self.site.provenance.forget()
            handler(node)

    def add(self, kind: str, node: Node, values: dict[str, Value]) -> Outcome:
        """Note an event of the replay."""
        outcome = Outcome(kind, node.index, values)
        self._result.outcomes.append(outcome)
        return outcome

    def skip(self, node: Node, reason: str) -> None:
        """Count a recorded event as not replayed."""
        self._skipped.add(node.index)
        self._result.skip(reason)

    def enter(self, node: Node) -> None:
        """Have the batch as this event met it: made if need be, outside edits applied."""
        snapshot = node.event.snapshot("entry")
        if self.batch is None:
            # A batch whose making was not recorded is rebuilt from the first look at it.
            self._build(node, snapshot)
            self.edits.after(snapshot)
        if self.edits.before(self.batch, snapshot, node.index):
            self.touched()

    def take(self) -> Snapshot:
        """The batch as it is now; taken anew only after something that can change it."""
        if self._seen is None:
            self._seen = self.site.snapshots.take(self.batch)
        return self._seen

    def touched(self) -> None:
        """The batch may have changed since it was looked at."""
        self._seen = None

    def call(
        self, outcome: Outcome, node: Node, name: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Call SGLang; an exception of its own ends `outcome` and the batch."""
        self.touched()
        try:
            return function(*args)
        except PadtraceError:
            raise
        except Exception as error:
            outcome.ended = False
            self.add("error", node, error_values(name, error)).ended = False
            raise BatchEndedError from None

    def _build(self, node: Node, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            self.skip(node, "a batch that was never observed")
            raise BatchEndedError
        self.batch = self.site.builder.build(snapshot)
        self.touched()
        shared = self.site.capabilities.lora_list_is_shared
        self.lora_owner = self.batch.lora_ids if shared else None

    def _made(self, node: Node) -> None:
        snapshot = node.event.snapshot("exit")
        self._build(node, snapshot)
        outcome = self.add("batch", node, {"function": node.event["function"]})
        for child in node.children:
            self.visit(child)
        self.edits.after(snapshot)
        outcome.values["exit"] = self.take()

    def _sync(self, node: Node) -> None:
        if self.batch is None:
            self.skip(node, "a batch that was never observed")
            raise BatchEndedError
        batch = self.batch
        self.touched()
        batch.global_num_tokens_cpu = batch.global_num_tokens_gpu = None
        batch.original_global_num_tokens_cpu = batch.global_num_tokens_for_logprob_cpu = None
        schedule = schedule_batch(node.event, batch, self.lora_owner)
        lists = (schedule.global_num_tokens, schedule.draft_global_num_tokens)
        self.scheduled = [counts for counts in lists if counts is not None]
        outcome = self.add("sync", node, _before_scaling(schedule))
        draft = node.event.text("worker") == "draft"
        scale = self.site.capabilities.scale
        function = self.call(outcome, node, "spec scaling", scale, batch, schedule, draft)
        after, source = batch.global_num_tokens_cpu, batch.original_global_num_tokens_cpu
        aliases = any(after is counts for counts in self.scheduled)
        if after is not None and source is not None and not aliases:
            width = getattr(batch.spec_info, "num_tokens_per_req", None)
            after[:] = self.site.provenance.scaled(source, after, width)
        outcome.values.update(
            {
                "function": function,
                "counts_after": _copied(after),
                "logprob_counts_after": _copied(batch.global_num_tokens_for_logprob_cpu),
                "original_counts": _copied(source),
                "aliases_scheduler_list": int(aliases),
                "can_run_dp_cuda_graph": node.event["can_run_dp_cuda_graph"],
            }
        )

    def _forward(self, node: Node) -> None:
        self.enter(node)
        values: dict[str, Value] = {
            "entry": self.take(),
            "forward_mode": self.batch.forward_mode.name,
            "can_run_graph": node.event["can_run_graph"],
            "failed": 0,
        }
        outcome = self.add("forward", node, values)
        self.padded = False
        try:
            for child in node.children:
                self.visit(child)
        except BatchEndedError:
            outcome.values["failed"], outcome.ended = 1, False
            raise
        if _failed_by_itself(node):
            # In the model, say, which is not run here: whether it would fail is not known.
            outcome.values["failed"] = Absent.NOT_OBSERVED
            self._result.skip("forward: it failed in code that is not replayed")

    def _ready(self, node: Node) -> None:
        self.enter_without_look(node)
        mark = getattr(self.batch, "mark_forward_metadata_ready", None)
        values: dict[str, Value] = dict.fromkeys(_READY, Absent.NO_ATTRIBUTE)
        if mark is not None:
            equivalent = node.event.integer("replan_equivalent")
            mark(replan_equivalent=bool(equivalent))
            self.touched()
            values = {
                "replan_equivalent": equivalent,
                "planned_bs": self.batch.forward_metadata_planned_bs,
                "planned_num_tokens": self.batch.forward_metadata_planned_num_tokens,
            }
        self.edits.after_unobserved(_marked(node))
        self.add("ready", node, values)

    def enter_without_look(self, node: Node) -> None:
        """For events that hold no snapshot: there must be a batch already."""
        if self.batch is None:
            self.skip(node, "a batch that was never observed")
            raise BatchEndedError

    def _graph(self, node: Node) -> None:
        self.enter(node)
        reason = self.site.graphs.unable(node.event, self.batch)
        if reason is not None:
            self.skip(node, reason)
            return
        outcome = self.add("graph", node, {"entry": self.take()})
        function = node.event.text("function") or ""
        judge = self.site.graphs.judge
        outcome.values.update(self.call(outcome, node, function, judge, node.event, self.batch))


def _failed_by_itself(node: Node) -> bool:
    """The forward failed by an exception that left no other hooked function first."""
    errors = [child.event for child in node.children if child.event.kind == "error"]
    return any(error.text("function") == "forward" for error in errors)


def _marked(node: Node) -> Snapshot:
    """What the mark left on the recorded batch, as far as the event says."""
    event = node.event
    named: Snapshot = {
        "forward_metadata_ready": 1,
        "forward_metadata_replan_equivalent": event["replan_equivalent"],
        "forward_metadata_planned_bs": event["planned_bs"],
        "forward_metadata_planned_num_tokens": event["planned_num_tokens"],
    }
    return {name: value for name, value in named.items() if not isinstance(value, Absent)}


def _before_scaling(schedule: Any) -> dict[str, Value]:
    return {
        "counts_before": _copied(schedule.global_num_tokens),
        "logprob_counts_before": _copied(schedule.global_num_tokens_for_logprob),
        "draft_counts_before": _copied(schedule.draft_global_num_tokens),
        "draft_logprob_counts_before": _copied(schedule.draft_global_num_tokens_for_logprob),
    }


def _copied(counts: Any) -> list[int] | None:
    return None if counts is None else [*map(int, counts)]
