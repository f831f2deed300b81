"""ForwardBatch.init_new and the per-rank counts it takes over from the scheduler."""

from __future__ import annotations

from typing import Any

from padtrace.record.probes.context import Context, exit_number
from padtrace.record.state import BATCH, RECORD_ATTRIBUTE, SYNC, BatchRecord, Frame
from padtrace.recording.absent import NO_ATTRIBUTE_CODE, NONE_CODE, NOT_OBSERVED_CODE

_MISSING = object()
_SCHEDULED = (
    "global_num_tokens",
    "global_num_tokens_for_logprob",
    "draft_global_num_tokens",
    "draft_global_num_tokens_for_logprob",
)


class InitNewProbe:
    """ForwardBatch.init_new(batch, model_runner, ...): numbers the batch, keeps its exit."""

    def __init__(self, context: Context, sync: SyncProbe | None) -> None:
        """
        Args:
            sync: given where init_new has the block of init_mlp_sync_metadata inline (SGLang
                before 0.5.18), so that the counts are taken at its exit.
        """
        self._context = context
        self._state = context.state
        self._sync = sync
        self._function = context.string("init_new")
        derive = None if sync is None else sync.derive
        context.compile(self, "init_new", "init_new", self._function, more=derive)

    def enter(self, cls: Any, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Frame:
        state = self._state
        frame = state.enter("init_new", state.new_record(state.worker_of(model_runner)))
        frame.subject = batch
        frame.failed = self._failed
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        state, record = self._state, frame.record
        record.owner = id(result)
        setattr(result, RECORD_ATTRIBUTE, record)
        if self._sync is not None:
            self._sync.derive(frame.subject, result, record)
        exit_seq = state.leave(frame)
        snapshot = self._context.snap(result)
        own = (self._function, self._context.keep(snapshot))
        state.event(BATCH, frame, exit_seq, own)

    def _failed(self, frame: Frame, observed: bool) -> None:
        exit_seq = exit_number(self._context, frame, observed)
        self._state.event(BATCH, frame, exit_seq, (self._function, NOT_OBSERVED_CODE))


class SyncProbe:
    """ForwardBatch.init_mlp_sync_metadata(batch, device): the counts before and after."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = context.state
        self._function = context.string("init_mlp_sync_metadata")
        self._inline = context.string("init_new")
        context.compile(self, "sync", "init_mlp_sync_metadata", self._function)

    def enter(self, forward_batch: Any, batch: Any, *args: Any, **kwargs: Any) -> Frame | None:
        if batch.global_num_tokens is None and not getattr(batch, "draft_global_num_tokens", None):
            return None
        record = self._context.record_of(forward_batch)
        frame = self._state.enter("init_mlp_sync_metadata", record)
        frame.subject = forward_batch
        frame.extra = (batch, _copies(batch))
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        exit_seq = self._state.leave(frame)
        batch, before = frame.extra
        self._write(frame, exit_seq, self._function, batch, before, frame.subject)

    def derive(self, batch: Any, forward_batch: Any, record: BatchRecord) -> None:
        """The same event where the block is inline: made when init_new returns."""
        if batch.global_num_tokens is None:
            return
        frame = self._state.enter("init_new", record)
        exit_seq = self._state.leave(frame)
        self._write(frame, exit_seq, self._inline, batch, _copies(batch), forward_batch)

    def _write(
        self,
        frame: Frame,
        exit_seq: int,
        function: int,
        batch: Any,
        before: list[Any],
        forward_batch: Any,
    ) -> None:
        counts, logprob_counts, draft_counts, draft_logprob_counts = before
        held = forward_batch.global_num_tokens_cpu
        source = forward_batch.original_global_num_tokens_cpu
        frame.record.scheduler_counts = source
        values: list[int] = []
        own = [function]
        for vector in (
            counts,
            held,
            logprob_counts,
            forward_batch.global_num_tokens_for_logprob_cpu,
            source,
            draft_counts,
            draft_logprob_counts,
        ):
            if vector.__class__ is list and (not vector or isinstance(vector[0], int)):
                own.append(len(vector))
                values += vector
            else:
                own.append(_missing(vector))
        own.append(held is source)
        vote = getattr(batch, "can_run_dp_cuda_graph", _MISSING)
        if vote is _MISSING:
            vote = getattr(batch, "can_run_decode_cuda_graph", _MISSING)
        own.append(bool(vote) if isinstance(vote, bool) else NOT_OBSERVED_CODE)
        self._state.event(SYNC, frame, exit_seq, own, values)


def _copies(batch: Any) -> list[Any]:
    """The scheduler's lists by content, since the call may edit them."""
    found: list[Any] = []
    for name in _SCHEDULED:
        vector: Any = getattr(batch, name, _MISSING)
        found.append(vector if vector is None or vector is _MISSING else list(vector))
    return found


def _missing(vector: Any) -> int:
    """Why a vector has no values."""
    if vector is None:
        return NONE_CODE
    return NO_ATTRIBUTE_CODE if vector is _MISSING else NOT_OBSERVED_CODE
