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


# Numbers in the frame of a graph event: what its bucket was chosen for, and the bucket.
_CHOSEN_FOR, _CHOSEN = 0, 1


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
        options = {"describe": self._describe, "flag": chooses}
        context.compile(self, "graph", function, self._function, **options)

    def _runner(self, runner: Any) -> _Runner:
        known = self._runners.get(id(runner))
        if known is None:
            known = self._runners[id(runner)] = _Runner(runner, self._context)
        return known

    def _describe(self, runner: Any) -> tuple[Any, ...]:
        """What stays the same of a runner, for the extension."""
        known = self._runner(runner)
        numbers = (known.name, known.algorithm, known.width, known.limit)
        return known.worker, numbers, known.captured

    def enter(self, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Frame:
        context = self._context
        known = self._runner(runner)
        record = context.record_of(forward_batch, known.worker)
        entry = context.snap(forward_batch)
        frame = self._state.enter(self._name, record)
        frame.kind = GRAPH
        frame.subject = runner
        frame.numbers = [NOT_OBSERVED_CODE, NOT_OBSERVED_CODE]
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
        if self._chooses and frame.get(_CHOSEN) == NOT_OBSERVED_CODE:
            # Releases without _pad_to_bucket leave the bucket on the runner.
            frame.put(_CHOSEN, integer_of(getattr(frame.subject, "bs", None)))
        if self._chooses and not self._state.open:
            self._context.snapshots.forget()
        verdict = int(result) if isinstance(result, bool) else NOT_OBSERVED_CODE
        self._complete(frame, exit_seq, verdict)

    def _failed(self, frame: Frame, observed: bool) -> None:
        self._complete(frame, exit_number(self._context, frame, observed), NOT_OBSERVED_CODE)

    def _complete(self, frame: Frame, exit_seq: int, verdict: int) -> None:
        chosen = (_ARGUMENT, frame.get(_CHOSEN_FOR), _BUCKET, frame.get(_CHOSEN))
        pairs = (EXIT_SEQ, exit_seq, _VERDICT, verdict, *chosen)
        self._context.update(GRAPH, frame.enter_seq, pairs)


class BucketWatch:
    """`_pad_to_bucket(raw_size, buckets)` and `_max_dp_batch_size(forward_batch)`."""

    def __init__(self, context: Context) -> None:
        self._open = context.state.open

    def padded(self, result: Any, *args: Any, **kwargs: Any) -> None:
        frame = self._choice()
        if frame is not None:
            raw = kwargs.get("raw_size", args[0] if args else None)
            frame.put(_CHOSEN_FOR, integer_of(raw))
            frame.put(_CHOSEN, integer_of(result))

    def largest(self, result: Any, *args: Any, **kwargs: Any) -> None:
        frame = self._choice()
        if frame is not None:
            frame.put(_CHOSEN_FOR, integer_of(result))

    def _choice(self) -> Frame | None:
        """The graph event in which a size is being chosen."""
        return next((frame for frame in reversed(self._open) if frame.kind == GRAPH), None)


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
