"""Drives a recorded batch through SGLang's own path, up to the kernel call and back.

From `init_new`'s answer on everything is the release's code: the forward of its model runner, the
pad, the plan where that release plans, its attention layer, its backend, the unpad; draft batches
go through its EAGLE draft worker. What was recorded of pads, plans, launches and their order is
not read here: it is what the outcome is compared with.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from padtrace.errors import PadtraceError
from padtrace.recording.absent import Absent
from padtrace.replay.worker.batches import BatchBuilder
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.chains import ChainNotes
from padtrace.replay.worker.context import Topology
from padtrace.replay.worker.events import RecordedEvent
from padtrace.replay.worker.groups import Group
from padtrace.replay.worker.instruments import Instruments
from padtrace.replay.worker.launches import LaunchJudge
from padtrace.replay.worker.model import Expectations
from padtrace.replay.worker.not_driven import NotDrivenError
from padtrace.replay.worker.provenance import Chain
from padtrace.replay.worker.recorded_batch import RecordedBatch
from padtrace.replay.worker.runner import Runners
from padtrace.replay.worker.standins import NotHeldError, StandIn
from padtrace.replay.worker.tap import DrivenEvent

_MODES = ("EXTEND", "MIXED", "DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
_DRAFT_INPUTS = ("EagleDraftInput", "EagleDraftExtendInput")
_OTHER_SIDE = {"before": "after", "after": "before"}
# Torch's own words, where code asks for a device whatever is shown.
_NO_CARD = "Torch not compiled with CUDA enabled"
_OURS = "/padtrace/replay/worker/"
# The kernels refuse in their own words; a stand-in of another kind that raises is a fault of ours.
_SPEAKS_FOR_SGLANG = ("leaves.py", "process_groups.py", "runner.py", "launches.py")


@dataclass(slots=True)
class Driven:
    """What came of one recorded batch.

    Attributes:
        events: in order of entry, numbered from 0.
        chains: enter_seq to column to the steps that made its value.
        reason: why it was not driven; then there are no events.
    """

    events: list[DrivenEvent] = field(default_factory=list)
    chains: dict[int, dict[str, Chain]] = field(default_factory=dict)
    reason: str = ""


class _DraftedError(BaseException):
    """A draft has made its forwards; the tree of its tokens is values, not rows."""


class Driver:
    """Drives the batches of one process; its topology must be active."""

    def __init__(
        self,
        capabilities: Capabilities,
        topology: Topology,
        instruments: Instruments,
        launches: LaunchJudge,
        builder: BatchBuilder,
        deep_gemm: bool = False,
    ) -> None:
        """
        Args:
            deep_gemm: the server's plans had DeepGEMM's lengths, though it had no card.
        """
        self._capabilities = capabilities
        self._instruments = instruments
        self._launches = launches
        self._builder = builder
        self._expectations = Expectations()
        self._cp_rank = topology.facts.parallel.attn_cp_rank
        self._facts = topology.facts
        self._why_not = ""
        self._side = self._facts.case.plan if self._facts.case else None
        instruments.tap.new_process()
        instruments.leaves.with_deep_gemm(deep_gemm)
        try:
            self._runners = Runners(capabilities, topology, self._expectations)
        except NotDrivenError as error:
            self._why_not = error.reason

    def key(self, group: Group) -> tuple[object, ...]:
        """Equal for batches whose inputs are equal, whatever was recorded of their outcome."""
        made = next((event for event in group.events if event.kind == "batch"), None)
        sync = next((event for event in group.events if event.kind == "sync"), None)
        first = made or group.events[0]
        unpads = [event for event in group.events if event.kind == "unpad"]
        return (
            _not_eager(group),
            _worker(group),
            first.code("exit" if made is not None else "entry"),
            None if sync is None else sync.inputs(),
            sum(event.kind == "forward" for event in group.events),
            bool(unpads) and unpads[0]["hidden_states_before.rows"] is None,
        )

    def drive(self, group: Group) -> Driven:
        """One recorded batch, all its forwards."""
        try:
            if self._why_not:
                raise NotDrivenError(self._why_not)
            batch = self._batch_of(group)
            path = self._path(batch, group)
            return self._run(batch, path)
        except NotDrivenError as error:
            return Driven(reason=error.reason)
        except NotHeldError as error:
            return Driven(reason=f"{error.what}; {error.why}")

    def _batch_of(self, group: Group) -> RecordedBatch:
        reason = _not_eager(group)
        if reason:
            raise NotDrivenError(reason)
        made = next((event for event in group.events if event.kind == "batch"), None)
        first = made or group.events[0]
        snapshot = first.snapshot("exit" if made is not None else "entry")
        if snapshot is None:
            raise NotDrivenError("a batch that was never observed")
        if snapshot["forward_mode"] not in _MODES:
            raise NotDrivenError(f"forward mode {snapshot['forward_mode']}")
        if isinstance(snapshot.get("tbo_split_seq_index"), int):
            raise NotDrivenError("two-batch overlap")
        sync = next((event for event in group.events if event.kind == "sync"), None)
        unpads = [event for event in group.events if event.kind == "unpad"]
        self._expectations.hidden = self._hidden_states(unpads[0] if unpads else None)
        return RecordedBatch(
            self._capabilities,
            self._builder,
            self._instruments.provenance,
            snapshot,
            sync,
            _worker(group),
        )

    def _hidden_states(self, unpad: RecordedEvent | None) -> bool | None:
        """Whether the model hands hidden states on, as recorded; None where the batch says it."""
        value = None if unpad is None else unpad["hidden_states_before.rows"]
        if unpad is None or (value is Absent.NOT_OBSERVED and self._facts.case is None):
            return None
        return value is not None

    # --- which way a batch goes -------------------------------------------------------------------

    def _path(self, batch: RecordedBatch, group: Group) -> Callable[[], None]:
        """The entry of SGLang's that a server takes for such a batch."""
        spec = batch.snapshot.get("spec_info")
        if batch.worker == "draft" and spec in _DRAFT_INPUTS:
            forwards = sum(event.kind == "forward" for event in group.events)
            kind = self._draft_kind(batch, forwards)
            draft = self._draft_worker(batch, forwards if kind == "draft" else 0)
            if kind == "draft":
                return lambda: self._draft(batch, draft)
            if kind == "extend for decode":
                return lambda: self._extend_for_decode(batch, draft)
            return lambda: self._extend_for_prefill(batch, draft)
        runner = self._runners.runner(batch.worker)

        def forward() -> None:
            made = self._capabilities.batch_class.init_new(batch.schedule(runner), runner)
            runner.forward(made)

        return forward

    def _draft_kind(self, batch: RecordedBatch, forwards: int) -> str:
        """What an EAGLE draft worker does with such a batch."""
        if batch.mode in ("EXTEND", "MIXED"):
            return "extend for prefill"
        if batch.mode == "DRAFT_EXTEND_V2":
            return "extend for decode"
        if batch.mode != "IDLE":
            return "draft"
        width = batch.snapshot.get("spec_info.num_tokens_per_req")
        facts = self._runners.of_worker("draft")
        if batch.snapshot.get("spec_info") == "EagleDraftInput":
            wide = isinstance(width, int) and width > max(1, facts.topk or 1)
            return "extend for decode" if wide else "draft"
        return "extend for prefill" if width == 1 else "extend for decode"

    def _draft_worker(self, batch: RecordedBatch, forwards: int) -> Any:
        """The draft worker of the recorded widths.

        Of a chain (top-k 1) SGLang asks for one draft token more than steps; what a made
        recording leaves out follows from it.
        """
        facts = self._runners.of_worker("draft")
        topk, width = facts.topk or 1, facts.speculative_num_draft_tokens or 1
        if batch.mode == "DRAFT_EXTEND_V2" and batch.batch_size:
            width = batch.integer("input_ids.rows") // batch.batch_size
        steps = facts.speculative_num_steps or (forwards + 1 if forwards else max(width - 1, 1))
        if topk == 1 and facts.speculative_num_steps is None:
            width = steps + 1
        try:
            return self._runners.draft_worker(steps, topk, width)
        except AssertionError as error:
            raise NotDrivenError(f"SGLang makes no such draft worker: {error}") from error

    def _draft(self, batch: RecordedBatch, draft: Any) -> None:
        kind = type(draft)
        schedule = batch.schedule(draft.draft_runner)
        vars(schedule)["spec_info"] = self._draft_input(batch, draft)

        def and_no_further(forward_batch: Any) -> None:
            kind.draft_forward(draft, forward_batch)
            raise _DraftedError

        draft.__dict__["draft_forward"] = and_no_further
        try:
            draft.draft(schedule)
        except _DraftedError:
            return

    def _draft_input(self, batch: RecordedBatch, draft: Any) -> Any:
        """The recorded input of the first step; what it holds besides rows is nobody's concern."""
        made = batch.spec_info()
        rows = batch.batch_size
        for name, value in (
            ("topk_p", torch.ones((rows, draft.topk))),
            ("topk_index", torch.zeros((rows, draft.topk), dtype=torch.int64)),
            ("bonus_tokens", torch.zeros(rows, dtype=torch.int64)),
        ):
            setattr(made, name, value)
        return made

    def _extend_for_decode(self, batch: RecordedBatch, draft: Any) -> None:
        runner, size = draft.draft_runner, batch.batch_size
        tokens = batch.integer("input_ids.rows")
        modes = self._capabilities.forward_mode
        before = modes.IDLE if batch.mode == "IDLE" else modes.TARGET_VERIFY
        result = StandIn(
            "batch result",
            {
                "accept_lens": self._accepted(batch, size),
                "next_token_ids": torch.zeros(tokens, dtype=torch.int64),
                "logits_output": StandIn("logits output", {"hidden_states": self._hidden(batch)}),
                "next_draft_input": StandIn("next draft input", {}),
                "can_run_cuda_graph": False,
                "prepared_draft_extend_inputs": None,
            },
        )
        draft._draft_extend_for_decode(batch.schedule(runner, forward_mode=before), result)

    def _extend_for_prefill(self, batch: RecordedBatch, draft: Any) -> None:
        size, extend = batch.batch_size, batch.snapshot.get("extend_seq_lens_cpu")
        lengths = [int(n) for n in extend] if isinstance(extend, list) else []
        if batch.mode != "IDLE" and len(lengths) != size:
            raise NotDrivenError("the lengths of a prefill were not observed")
        prefix = batch.snapshot.get("extend_prefix_lens_cpu")
        schedule = batch.schedule(
            draft.draft_runner,
            extend_lens=lengths,
            chunked_req_next_prompt_token=None,
            extend_seq_lens=lengths,
            prefix_lens=prefix if isinstance(prefix, list) else None,
        )
        draft._draft_extend_for_prefill(
            schedule, self._hidden(batch), torch.zeros(size, dtype=torch.int64)
        )

    def _hidden(self, batch: RecordedBatch) -> Any:
        """The hidden states that the target handed on, or None where there were none."""
        rows = batch.snapshot.get("spec_info.hidden_states.rows")
        if rows is None:
            return None
        count = rows if isinstance(rows, int) else batch.integer("input_ids.rows")
        return torch.zeros((count, 1))

    def _accepted(self, batch: RecordedBatch, size: int) -> Any:
        """Accepted lengths: no row count depends on them, so each accepts its first token."""
        return torch.ones(size, dtype=torch.int64)

    # --- the run ----------------------------------------------------------------------------------

    def _run(self, batch: RecordedBatch, path: Callable[[], None]) -> Driven:
        instruments = self._instruments
        tap, notes = instruments.tap, ChainNotes(instruments.provenance)
        instruments.leaves.judge = self._launches
        instruments.answer = batch.make
        tap.begin(self._cp_rank, notes.note)
        failed: Exception | None = None
        try:
            with torch.no_grad():
                path()
        except (NotDrivenError, NotHeldError):
            raise
        except PadtraceError:
            raise
        except Exception as error:
            failed = error
        finally:
            instruments.answer = None
            instruments.leaves.judge = None
        if failed is not None:
            _check_whose(failed)
            if tap.raised is None:
                tap.note_error(failed)
        driven = Driven(tap.end(), notes.chains)
        if self._side in _OTHER_SIDE and _planned(driven.events) == _OTHER_SIDE[self._side]:
            raise NotDrivenError(f"SGLang plans it {_OTHER_SIDE[self._side]} the pad")
        return driven


def _planned(events: list[DrivenEvent]) -> str | None:
    """Whether the plan was made before or after the pad; None where there are not both."""
    plans = [event.entered for event in events if isinstance(event.values.get("planned.rows"), int)]
    pads = [event.entered for event in events if event.kind == "pad"]
    if not plans or not pads:
        return None
    return "before" if plans[0] < pads[0] else "after"


def _worker(group: Group) -> str:
    """Whose model runner a batch belongs to."""
    workers = (event.text("worker") for event in group.events)
    return next((name for name in workers if name in ("target", "draft")), "target")


def _not_eager(group: Group) -> str:
    """Why SGLang's eager path is not this batch's, or ""."""
    forwards = [event for event in group.events if event.kind == "forward"]
    if not forwards:
        return "no forward of it was recorded"
    if any(event.integer("can_run_graph") == 1 for event in forwards):
        return "it ran in a CUDA graph"
    if any(event.text("phase") == "capture" for event in forwards):
        return "a graph was captured"
    return ""


def _check_whose(error: Exception) -> None:
    """An exception of SGLang's is a result; one of a stand-in of ours is a fault of the driver."""
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or "one that is not named"
        raise NotDrivenError(f"SGLang imports a module that is not here: {missing}") from error
    if _NO_CARD in str(error):
        raise NotDrivenError("SGLang makes a tensor on a card, and there is none") from error
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename.replace("\\", "/") if frames else ""
    if _OURS in last and not last.endswith(_SPEAKS_FOR_SGLANG):
        raise NotDrivenError(
            f"padtrace's stand-in failed: {type(error).__name__} at"
            f" {last.rsplit('/', 1)[1]}:{frames[-1].lineno}: {str(error)[:120]}"
        ) from error
