"""What all probes share: the state, the snapshots, the batch of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from padtrace.record import native
from padtrace.record.native import Snapshot
from padtrace.record.snapshots import BATCH_SIZE, MODE, TOKEN_ROWS, SnapshotTaker
from padtrace.record.state import BATCH, RECORD_ATTRIBUTE, BatchRecord, Frame, State
from padtrace.record.values import rows_of
from padtrace.recording.absent import NOT_OBSERVED_CODE

# What stands for a snapshot that nobody took.
UNSEEN = Snapshot([], [])


class Context:
    """Handed to every probe.

    Attributes:
        snapshots: set once ForwardBatch is known; nothing is hooked before.
    """

    def __init__(self, state: State, forward_batch_class: type, cp_rank: Callable[[], int]) -> None:
        self.state = state
        self.string = state.string
        self.update = state.writer.update
        self.keep = state.writer.keep
        self.forward_batch_class = forward_batch_class
        self.snapshots = SnapshotTaker(forward_batch_class, state.string, cp_rank)
        self.snap = self.snapshots.take
        state.let_go = self.snapshots.forget
        self.backends: Any = None
        self._construction = state.string("construction")
        self.shared = self._what_is_shared()

    def _what_is_shared(self) -> Any:
        """What the compiled probes share; None where there is no extension."""
        if native.compiled is None:
            return None
        state = self.state
        return native.compiled.Shared(
            state,
            self.snapshots.looker,
            self.record_of,
            rows_of,
            state.nobody,
            self.forward_batch_class,
            (state.target, state.draft),
            (MODE, BATCH_SIZE, TOKEN_ROWS),
        )

    def compiled(self, kind: str, title: str, function: int = -1, **options: Any) -> Any:
        """A probe of the extension, or None where there is none.

        Args:
            kind: what the extension calls this probe.
            title: the name of the hooked function.
            function: its string id, where the event has a column for it.
            options: what else that probe needs, see native_c/.
        """
        if self.shared is None:
            return None
        return native.compiled.Probe(self.shared, kind, title, function, **options)

    def compile(self, probe: Any, *described: Any, **options: Any) -> None:
        """Have the extension do what the methods of a probe do, where it is there."""
        core = self.compiled(*described, **options)
        if core is not None:
            probe.enter, probe.leave = core.enter, core.leave

    def record_of(self, batch: Any, worker: int | None = None) -> BatchRecord:
        """The record of a batch, made at first sight.

        A copy or view that SGLang makes inside a hooked call (eager buffers, graph views) belongs
        to the batch of that call. A ForwardBatch met anywhere else that no init_new made (capture,
        warm-up, a child of two-batch overlap) gets a number and a batch event of its own.
        """
        record: BatchRecord | None = getattr(batch, RECORD_ATTRIBUTE, None)
        if record is not None and record.owner == id(batch):
            return record
        state = self.state
        own = isinstance(batch, self.forward_batch_class)
        child = own and getattr(batch, "tbo_parent_token_range", None) is not None
        if not own or (state.open and not child):
            return state.enclosing_record()
        if worker is None:
            worker = state.open[-1].record.worker if state.open else NOT_OBSERVED_CODE
        record = state.new_record(worker, id(batch))
        setattr(batch, RECORD_ATTRIBUTE, record)
        frame = state.enter("construction", record)
        exit_seq = state.leave(frame)
        snapshot = self.snap(batch)
        state.event(BATCH, frame, exit_seq, (self._construction, self.keep(snapshot)))
        return record


def exit_number(context: Context, frame: Frame, observed: bool) -> int:
    """The exit number of a call that an exception left, if the exception was seen passing."""
    if not observed:
        return NOT_OBSERVED_CODE
    state = context.state
    seq = state.seq
    state.seq = seq + 1
    return seq
