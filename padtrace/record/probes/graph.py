"""Graph runners: whether a graph may run, and which captured size it runs at."""

from __future__ import annotations

from typing import Any

from padtrace.record.probes.context import Context, exit_number
from padtrace.record.snapshots import BATCH_SIZE
from padtrace.record.state import EXIT_SEQ, GRAPH, Frame
from padtrace.record.values import integer_of
from padtrace.record.wire import column_index
from padtrace.recording.absent import NO_ATTRIBUTE_CODE, NONE_CODE, NOT_OBSERVED_CODE

_VERDICT = column_index("graph", "verdict")
_ARGUMENT = column_index("graph", "bucket_argument")
_BUCKET = column_index("graph", "bucket")

_WIDTHS = ("captured_req_width", "num_tokens_per_bs", "num_tokens_per_batch")
_CAPTURED = ("capture_bs", "capture_num_tokens")
_LIMITS = ("max_bs", "max_num_tokens")


class Choice:
    """The bucket chosen while a graph event is open."""

    __slots__ = ("argument", "bucket")

    def __init__(self) -> None:
        self.argument = NOT_OBSERVED_CODE
        self.bucket = NOT_OBSERVED_CODE


class _Runner:
    """What stays the same of one runner object."""

    __slots__ = ("algorithm", "captured", "limit", "name", "runner", "width", "worker")

    def __init__(self, runner: Any, context: Context) -> None:
        model_runner = getattr(runner, "model_runner", None)
        self.runner = runner
        self.name = context.string(type(runner).__name__)
        algorithm = getattr(getattr(model_runner, "spec_algorithm", None), "name", None)
        self.algorithm = NONE_CODE if algorithm is None else context.string(str(algorithm))
        captured = _first(runner, _CAPTURED)
        self.captured = list(captured) if isinstance(captured, (list, tuple)) else None
        self.width = _code(runner, _WIDTHS)
        self.limit = _code(runner, _LIMITS)
        worker = None if model_runner is None else context.state.worker_of(model_runner)
        self.worker = worker


class GraphProbe:
    """One function of a graph runner: can_run_graph, load_batch, execute and older names.

    An event is written when the function begins, since a replay may never return, and completed by
    an update when it ends.
    """

    def __init__(self, context: Context, function: str, *, chooses: bool) -> None:
        """
        Args:
            chooses: the function picks a captured size rather than only judging.
        """
        self._context = context
        self._state = context.state
        self._name = function
        self._chooses = chooses
        self._function = context.string(function)
        self._runners: dict[int, _Runner] = {}

    def enter(self, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Frame:
        context = self._context
        known = self._runners.get(id(runner))
        if known is None:
            known = self._runners[id(runner)] = _Runner(runner, context)
        record = context.record_of(forward_batch, known.worker)
        entry = context.snap(forward_batch)
        frame = self._state.enter(self._name, record)
        frame.subject = runner
        frame.extra = Choice()
        frame.failed = self._failed
        captured = known.captured
        own = (
            known.name,
            self._function,
            context.keep(entry),
            known.algorithm,
            entry.scalar(BATCH_SIZE),
            known.width,
            NOT_OBSERVED_CODE if captured is None else len(captured),
            known.limit,
            NOT_OBSERVED_CODE,
            NOT_OBSERVED_CODE,
            NOT_OBSERVED_CODE,
        )
        self._state.event(GRAPH, frame, NOT_OBSERVED_CODE, own, captured or ())
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        exit_seq = self._state.leave(frame)
        choice: Choice = frame.extra
        if self._chooses and choice.bucket == NOT_OBSERVED_CODE:
            # Releases without _pad_to_bucket leave the bucket on the runner.
            choice.bucket = integer_of(getattr(frame.subject, "bs", None))
        if self._chooses and not self._state.open:
            self._context.snapshots.forget()
        verdict = int(result) if isinstance(result, bool) else NOT_OBSERVED_CODE
        pairs = (EXIT_SEQ, exit_seq, _VERDICT, verdict)
        self._context.update(
            GRAPH,
            frame.enter_seq,
            (*pairs, _ARGUMENT, choice.argument, _BUCKET, choice.bucket),
        )

    def _failed(self, frame: Frame, observed: bool) -> None:
        choice: Choice = frame.extra
        exit_seq = exit_number(self._context, frame, observed)
        self._context.update(
            GRAPH,
            frame.enter_seq,
            (EXIT_SEQ, exit_seq, _ARGUMENT, choice.argument, _BUCKET, choice.bucket),
        )


class BucketWatch:
    """`_pad_to_bucket(raw_size, buckets)` and `_max_dp_batch_size(forward_batch)`."""

    def __init__(self, context: Context) -> None:
        self._open = context.state.open

    def padded(self, result: Any, *args: Any, **kwargs: Any) -> None:
        choice = self._choice()
        if choice is not None:
            raw = kwargs.get("raw_size", args[0] if args else None)
            choice.argument = integer_of(raw)
            choice.bucket = integer_of(result)

    def largest(self, result: Any, *args: Any, **kwargs: Any) -> None:
        choice = self._choice()
        if choice is not None:
            choice.argument = integer_of(result)

    def _choice(self) -> Choice | None:
        for frame in reversed(self._open):
            if isinstance(frame.extra, Choice):
                return frame.extra
        return None


def _first(runner: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        value = getattr(runner, name, None)
        if value is not None:
            return value
    return None


def _code(runner: Any, names: tuple[str, ...]) -> int:
    if not any(hasattr(runner, name) for name in names):
        return NO_ATTRIBUTE_CODE
    return integer_of(_first(runner, names))
