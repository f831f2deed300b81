"""What one recorded process knows while it runs: numbers, the open events, the step, the phase.

The functions that are hooked run on the scheduler's thread, so nothing here is locked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from padtrace.record.native import BatchRecord as BatchRecord
from padtrace.record.native import Frame as Frame
from padtrace.record.native import StateCore
from padtrace.record.ring import EventWriter
from padtrace.record.wire import column_index, kind_index
from padtrace.recording.absent import NOT_OBSERVED_CODE

# Kept on the ForwardBatch itself: the class is no key of a weak dictionary (it has no hash), and
# SGLang walks its dataclass fields, never its attributes, except for a search for tensors.
RECORD_ATTRIBUTE = "_padtrace"

FORWARD, BATCH, SYNC, PLAN, READY, PAD, GRAPH, LAUNCH, UNPAD, ERROR = (
    kind_index(kind)
    for kind in (
        "forward",
        "batch",
        "sync",
        "plan",
        "ready",
        "pad",
        "graph",
        "launch",
        "unpad",
        "error",
    )
)

_CAPTURE_MODULES = (
    "sglang.srt.model_executor.runner_utils.capture_mode",
    "sglang.srt.model_executor.cuda_graph_runner",
)


EXIT_SEQ = column_index("forward", "exit_seq")


class State(StateCore):
    """See the module. One per process."""

    def __init__(self, writer: EventWriter) -> None:
        super().__init__(writer, writer.clock_offset_ns)
        self.writer = writer
        self.string = writer.string
        self.target = writer.string("target")
        self.draft = writer.string("draft")
        self.phase = self.calm_phase = writer.string("warmup")
        self.capture_phase = writer.string("capture")
        self.serve_phase = writer.string("serve")
        self.source_sync = writer.string("sync")
        self.step_source = writer.string("round")
        self.nobody = BatchRecord(NOT_OBSERVED_CODE, NOT_OBSERVED_CODE)
        self.nobody.draft_step = NOT_OBSERVED_CODE
        self.guard = Guard(self)
        # Lets go of the tensors last looked at; the context sets it.
        self.let_go: Callable[[], None] = _nothing
        self.on_error: list[Callable[[BaseException, str, BatchRecord], None]] = []

    def worker_of(self, model_runner: Any) -> int:
        return self.draft if model_runner.is_draft_worker else self.target

    def new_record(self, worker: int, owner: int = 0) -> BatchRecord:
        number = self.batches
        self.batches = number + 1
        return BatchRecord(number, worker, owner)

    def enclosing_record(self) -> BatchRecord:
        """The batch of the innermost open event, or nobody's."""
        return self.open[-1].record if self.open else self.nobody

    def unwind(self, error: BaseException) -> None:
        """An exception left the outermost hooked call: close what is open, innermost first."""
        running = self.open
        innermost = running[-1] if running else None
        for hear in self.on_error:
            title = innermost.title if innermost else ""
            hear(error, title, innermost.record if innermost else self.nobody)
        while running:
            self._close_failed(running[-1], True)

    def _abandon(self, frame: Frame) -> None:
        """SGLang caught an exception that passed hooked calls; their frames are still open."""
        running = self.open
        while running:
            if running[-1] is frame:
                running.pop()
                return
            self._close_failed(running[-1], False)

    def _close_failed(self, frame: Frame, observed: bool) -> None:
        failed = frame.failed
        try:
            if failed is not None:
                failed(frame, observed)
        finally:
            if self.open and self.open[-1] is frame:
                self.open.pop()

    def _set_phase(self) -> None:
        if self.capturing is None:
            for name in _CAPTURE_MODULES:
                found = getattr(sys.modules.get(name), "get_is_capture_mode", None)
                if found is not None:
                    self.capturing = found
                    break
        capturing = self.capturing is not None and self.capturing()
        self.phase = self.capture_phase if capturing else self.calm_phase


def _nothing() -> None:
    return None


class Guard:
    """Sees an exception leave an outermost hooked call, and lets it pass unchanged.

    A with block rather than a try, so that no handler of ours ever holds SGLang's exception.
    """

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            try:
                self._state.unwind(error)
            except Exception:
                # Whatever went wrong with us, the server's own exception must be what is seen.
                self._state.open.clear()
