"""prepare_mlp_sync_batch, _pad_inputs_to_size and post_forward_mlp_sync_batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from padtrace.record.native import Snapshot
from padtrace.record.probes.context import UNSEEN, Context, exit_number
from padtrace.record.snapshots import TOKEN_ROWS
from padtrace.record.state import PAD, UNPAD, BatchRecord, Frame
from padtrace.record.values import rows_of
from padtrace.recording.absent import NONE_CODE, NOT_OBSERVED_CODE

_OWNED = (
    "extend_seq_lens_cpu",
    "extend_prefix_lens_cpu",
    "extend_logprob_start_lens_cpu",
    "lora_ids",
)


# Numbers in the frame of a pad.
_NUM_TOKENS, _BS = 0, 1


class PadProbe:
    """ForwardBatch.prepare_mlp_sync_batch(model_runner)."""

    title = "prepare_mlp_sync_batch"

    def __init__(
        self, context: Context, padded: Callable[[BatchRecord, Snapshot], None] | None = None
    ) -> None:
        """
        Args:
            padded: the alarm, where no launch will tell it; given the batch after the pad.
        """
        self._context = context
        self._state = context.state
        self._function = context.string(self.title)
        self._padded = padded
        context.compile(self, "pad", self.title, self._function, more=padded)

    def enter(self, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Frame | None:
        return self._open(batch, model_runner)

    def _open(self, batch: Any, model_runner: Any) -> Frame:
        context, state = self._context, self._state
        record = context.record_of(batch, state.worker_of(model_runner))
        frame = state.enter(self.title, record)
        frame.failed = self._failed
        frame.kind = PAD
        frame.subject = batch
        frame.entry = context.snap(batch)
        counts = record.scheduler_counts
        owned = [getattr(batch, name, None) for name in _OWNED]
        frame.extra = (None if counts is None else counts[:], owned)
        frame.numbers = [NOT_OBSERVED_CODE, NOT_OBSERVED_CODE]
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        exit_seq = self._state.leave(frame)
        after = self._context.snap(frame.subject)
        before = frame.entry.scalar(TOKEN_ROWS)
        frame.record.padded(self.title, frame.enter_seq, before, after.scalar(TOKEN_ROWS))
        self._write(frame, exit_seq, after)
        if self._padded is not None:
            self._padded(frame.record, after)

    def _failed(self, frame: Frame, observed: bool) -> None:
        self._write(frame, exit_number(self._context, frame, observed), UNSEEN)

    def _write(self, frame: Frame, exit_seq: int, after: Snapshot) -> None:
        counts_before, owned = frame.extra
        keep = self._context.keep
        counts = frame.record.scheduler_counts
        changed = NOT_OBSERVED_CODE if counts is None else int(counts != counts_before)
        own = [self._function, keep(frame.entry), keep(after), *frame.numbers, changed]
        own += [NONE_CODE if one is None else rows_of(one) for one in owned]
        self._state.event(PAD, frame, exit_seq, own)


class PadInputsProbe(PadProbe):
    """ForwardBatch._pad_inputs_to_size(model_runner, num_tokens, bs).

    Inside prepare_mlp_sync_batch of the same batch it completes that event; alone, or for a child
    of two-batch overlap, it is an event of its own.
    """

    title = "_pad_inputs_to_size"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        context.compile(self, "pad_inputs", self.title, self._function)

    def enter(
        self, batch: Any, model_runner: Any, num_tokens: Any = None, bs: Any = None, **kwargs: Any
    ) -> Frame | None:
        running = self._state.open
        tokens = num_tokens if isinstance(num_tokens, int) else NOT_OBSERVED_CODE
        requests = bs if isinstance(bs, int) else NOT_OBSERVED_CODE
        outer = running[-1] if running else None
        if outer is None or outer.title != PadProbe.title or not outer.subject_is(batch):
            outer = None
        frame = outer or self._open(batch, model_runner)
        frame.put(_NUM_TOKENS, tokens)
        frame.put(_BS, requests)
        return frame if outer is None else None


class UnpadProbe:
    """ForwardBatch.post_forward_mlp_sync_batch(logits_output)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = context.state
        context.compile(self, "unpad", "post_forward_mlp_sync_batch")

    def enter(self, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> Frame:
        context = self._context
        frame = self._state.enter("post_forward_mlp_sync_batch", context.record_of(batch))
        frame.failed = self._failed
        frame.subject = batch
        frame.entry = context.snap(batch)
        frame.extra = (logits_output, _logits_rows(logits_output))
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        exit_seq = self._state.leave(frame)
        logits_output, _ = frame.extra
        after = self._context.snap(frame.subject)
        self._write(frame, exit_seq, after, _logits_rows(logits_output))

    def _failed(self, frame: Frame, observed: bool) -> None:
        exit_seq = exit_number(self._context, frame, observed)
        self._write(frame, exit_seq, UNSEEN, (NOT_OBSERVED_CODE, NOT_OBSERVED_CODE))

    def _write(self, frame: Frame, exit_seq: int, after: Snapshot, rows: tuple[int, int]) -> None:
        _, before = frame.extra
        keep = self._context.keep
        own = (keep(frame.entry), keep(after), before[0], rows[0], before[1], rows[1])
        self._state.event(UNPAD, frame, exit_seq, own)


def _logits_rows(output: Any) -> tuple[int, int]:
    """Rows of next_token_logits and of hidden_states."""
    return (
        rows_of(getattr(output, "next_token_logits", None)),
        rows_of(getattr(output, "hidden_states", None)),
    )
