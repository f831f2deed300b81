"""ModelRunner.forward: begin, end, and whether it ran in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from padtrace.record.probes.context import Context, exit_number
from padtrace.record.probes.ready import ReadyProbe
from padtrace.record.snapshots import MODE
from padtrace.record.state import EXIT_SEQ, FORWARD, Frame
from padtrace.record.wire import column_index
from padtrace.recording.absent import NOT_OBSERVED_CODE

_CAN_RUN_GRAPH = column_index("forward", "can_run_graph")
_FAILED = column_index("forward", "failed")


class ForwardProbe:
    """ModelRunner.forward(forward_batch, ...).

    Written when it begins, so that a process that dies inside it leaves it behind; completed by an
    update when it ends.
    """

    def __init__(
        self,
        context: Context,
        finish_launches: Callable[[], None],
        first_of: Callable[[Any], None],
        skip_flag: ReadyProbe | None,
    ) -> None:
        """
        Args:
            finish_launches: writes the counts of coalesced launches.
            first_of: called with the model runner at its first forward, for the facts.
            skip_flag: given where forward takes skip_attn_backend_init and the batch has no
                mark_forward_metadata_ready (SGLang before 0.5.15).
        """
        self._context = context
        self._state = context.state
        self._finish_launches = finish_launches
        self._first_of = first_of
        self._skip_flag = skip_flag
        self._seen: set[int] = set()
        derive = None if skip_flag is None else skip_flag.derive
        options = {"finish": finish_launches, "describe": self._meet, "more": derive}
        context.compile(self, "forward", "forward", **options)

    def enter(self, model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Frame:
        state, context = self._state, self._context
        self._meet(model_runner)
        worker = state.worker_of(model_runner)
        record = context.record_of(forward_batch, worker)
        record.draft_step = record.forwards if worker == state.draft else 0
        record.forwards += 1
        frame = state.enter("forward", record)
        frame.numbers = [state.forward]
        frame.failed = self._failed
        state.forward = state.forwards
        state.forwards += 1
        snapshot = context.snap(forward_batch)
        mode = snapshot.scalar(MODE)
        own = (context.keep(snapshot), mode, NOT_OBSERVED_CODE, NOT_OBSERVED_CODE)
        state.event(FORWARD, frame, NOT_OBSERVED_CODE, own)
        if self._skip_flag is not None:
            skip = args[0] if args else kwargs.get("skip_attn_backend_init")
            if skip:
                self._skip_flag.derive(forward_batch, record)
        return frame

    def _meet(self, model_runner: Any) -> None:
        if id(model_runner) not in self._seen:
            self._seen.add(id(model_runner))
            self._first_of(model_runner)

    def leave(self, frame: Frame, result: Any) -> None:
        verdict = getattr(result, "can_run_graph", None)
        if verdict is None and isinstance(result, tuple) and len(result) == 2:
            verdict = result[1]
        code = int(verdict) if isinstance(verdict, bool) else NOT_OBSERVED_CODE
        self._end(frame, self._state.leave(frame), code, 0)

    def _failed(self, frame: Frame, observed: bool) -> None:
        exit_seq = exit_number(self._context, frame, observed)
        self._end(frame, exit_seq, NOT_OBSERVED_CODE, 1)

    def _end(self, frame: Frame, exit_seq: int, can_run_graph: int, failed: int) -> None:
        # First, so that nothing that fails after it keeps a tensor.
        self._context.snapshots.forget()
        self._finish_launches()
        self._state.forward = frame.get(0)
        pairs = (EXIT_SEQ, exit_seq, _CAN_RUN_GRAPH, can_run_graph, _FAILED, failed)
        self._context.update(FORWARD, frame.enter_seq, pairs)
