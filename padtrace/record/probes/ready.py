"""mark_forward_metadata_ready: the batch was planned outside the forward."""

from __future__ import annotations

from typing import Any

from padtrace.record.probes.context import Context
from padtrace.record.state import READY, BatchRecord, Frame
from padtrace.record.values import integer_of, rows_of
from padtrace.recording.absent import NO_ATTRIBUTE_CODE


class ReadyProbe:
    """ForwardBatch.mark_forward_metadata_ready(replan_equivalent=False)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = context.state
        context.compile(self, "ready", "mark_forward_metadata_ready")

    def enter(self, batch: Any, *args: Any, **kwargs: Any) -> Frame:
        state = self._state
        frame = state.enter("mark_forward_metadata_ready", self._context.record_of(batch))
        frame.subject = batch
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        batch = frame.subject
        exit_seq = self._state.leave(frame)
        own = (
            integer_of(batch.forward_metadata_replan_equivalent),
            integer_of(batch.forward_metadata_planned_bs),
            integer_of(batch.forward_metadata_planned_num_tokens),
        )
        self._state.event(READY, frame, exit_seq, own)

    def derive(self, batch: Any, record: BatchRecord) -> None:
        """The same from the flag skip_attn_backend_init, in releases without the marker.

        There a forward never plans a skipped batch again, and the batch keeps no planned sizes;
        what it has now is what it was planned with.
        """
        frame = self._state.enter("skip_attn_backend_init", record)
        exit_seq = self._state.leave(frame)
        own = (NO_ATTRIBUTE_CODE, integer_of(batch.batch_size), rows_of(batch.input_ids))
        self._state.event(READY, frame, exit_seq, own)
