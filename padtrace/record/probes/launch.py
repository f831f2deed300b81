"""Kernel calls by shapes: written before the call, equal ones of a forward counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from padtrace.record import native
from padtrace.record.hooks import Around, Hook, by_extension
from padtrace.record.probes.context import Context
from padtrace.record.probes.plan import backends_of, note_planned_rows
from padtrace.record.state import EXIT_SEQ, LAUNCH, BatchRecord, Frame
from padtrace.record.values import integer_of, rows_of
from padtrace.record.wire import column_index
from padtrace.recording.absent import NONE_CODE, NOT_OBSERVED_CODE

_COUNT = column_index("launch", "count")
_FAILED = column_index("launch", "failed")
_SPLITS = column_index("launch", "num_splits.rows")

# Parameters by position, and which of them the columns of a launch are read from.
PARAMETERS = {
    "flash_mla_with_kvcache": (
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata",
        "num_splits", "softmax_scale", "causal", "descale_q", "descale_k", "is_fp8_kvcache",
        "indices",
    ),
    "get_mla_metadata": ("cache_seqlens",),
    "fp8_paged_mqa_logits": ("q", "k_cache", "weights", "cache_seqlens", "block_table"),
    "get_paged_mqa_logits_metadata": ("cache_seqlens",),
}  # fmt: skip
# DeepGEMM's own names for the same things.
_ALIASES = {
    "fused_kv_cache": "k_cache",
    "kv_cache": "k_cache",
    "context_lens": "cache_seqlens",
}
# In the place of an argument that was not given: such a call is never known again.
_NOT_GIVEN = object()
_SHAPED = ("q", "num_splits", "cache_seqlens", "block_table", "indices", "k_cache")
_OTHERS = ("tile_scheduler_metadata", "head_dim_v", "is_fp8_kvcache")
_DEEP_GEMM = ("fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata")


class RowAlarm(Protocol):
    """Told of every FlashMLA call with new shapes, before it is made."""

    def launch(self, function: str, record: BatchRecord, q_rows: int, splits: int) -> None: ...


class _Launch:
    """One shape of call within one forward, and the tensors it was last called with.

    An equal call is told sooner by the plan's tensors, which are the same objects in every layer,
    than by all shapes: with those and the shapes of q and indices the same, block table and cache
    cannot differ in the rows that the kernel takes.
    """

    __slots__ = (
        "cache_seqlens",
        "count",
        "exit_seq",
        "extra_pairs",
        "frame",
        "indices_shape",
        "inside",
        "num_splits",
        "q_shape",
        "seen",
    )

    def __init__(self, frame: Frame, seen: tuple[Any, ...], inside: Frame | None) -> None:
        self.frame = frame
        self.seen = seen
        self.inside = inside
        self.count = 1
        self.exit_seq = NOT_OBSERVED_CODE
        self.extra_pairs: tuple[int, ...] = ()

    def remember(self, given: dict[str, Any]) -> None:
        """Keep what the next call is compared with; positional calls are compared in full."""
        self.num_splits = given.get("num_splits", _NOT_GIVEN)
        self.cache_seqlens = given.get("cache_seqlens")
        self.q_shape = _shape(given.get("q"))
        self.indices_shape = _shape(given.get("indices"))

    def same_shapes(self, given: dict[str, Any]) -> bool:
        if _shape(given.get("q")) != self.q_shape:
            return False
        indices = given.get("indices")
        if indices is None:
            return self.indices_shape is None
        return bool(indices.shape == self.indices_shape)


class LaunchProbe:
    """One kernel function."""

    def __init__(
        self,
        context: Context,
        function: str,
        alarm: RowAlarm | None,
        kept: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> None:
        """
        Args:
            kept: given the number of every new launch of a forward and its arguments by name.
        """
        self._context = context
        self._state = context.state
        self._running = context.state.open
        self._name = function
        self._function = context.string(function)
        self._names = PARAMETERS[function]
        self._metadata = function == "get_mla_metadata"
        self._aliased = function in _DEEP_GEMM
        self._alarm = alarm
        self._kept = kept
        self._dtypes: dict[Any, int] = {}
        self._backends = backends_of(context)
        self._number = -1
        self._launches: list[_Launch] = []
        self._last: _Launch | None = None
        self._now: _Launch | None = None
        self.finish: Callable[[], None] = self._finish
        self._core: Any = None
        if context.shared is not None:
            self._core = core = self._compiled(context.shared)
            self.finish = core.finish
            self._enter, self._leave = core.enter, core.leave  # type: ignore[method-assign]

    def _compiled(self, shared: Any) -> Any:
        """What does the same in the extension."""
        positions = {name: place for place, name in enumerate(self._names)}
        aliases = _ALIASES if self._aliased else {}
        arguments = []
        for name in (*_SHAPED, *_OTHERS):
            also = [alias for alias, meant in aliases.items() if meant == name]
            arguments.append((positions.get(name, -1), name, *also))
        return native.compiled.Launch(
            shared,
            self._name,
            self._function,
            tuple(arguments),
            self._metadata,
            None if self._alarm is None else self._alarm.launch,
            None if self._kept is None else self._keep,
            self._context.string,
        )

    def around(self, hook: Hook, is_compiling: Callable[[], bool]) -> Around:
        """Like `hooks.around`, but nearly free for an equal call of the same forward.

        Written out in one piece: it runs once per layer.
        """
        running, guard = self._running, self._state.guard
        self._number = hook.number
        if self._core is not None:
            return self._by_extension(hook, is_compiling)

        def hooked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            frame = None
            depth = len(running)
            if hook.alive:
                try:
                    last = self._last
                    if (
                        last is not None
                        and not args
                        and last.num_splits is kwargs.get("num_splits")
                        and last.cache_seqlens is kwargs.get("cache_seqlens")
                        and last.same_shapes(kwargs)
                        and depth
                        and last.inside is running[-1]
                    ):
                        last.count += 1
                        frame = last.frame
                        running.append(frame)
                    else:
                        frame = self._enter(*args, **kwargs)
                except Exception as error:
                    hook.lose(error, depth)
            if frame is None:
                return original(*args, **kwargs)
            if depth:
                result = original(*args, **kwargs)
            else:
                with guard:
                    result = original(*args, **kwargs)
            if running and running[-1] is frame:
                running.pop()
            if self._now is not None and hook.alive:
                try:
                    self._leave(frame, result)
                except Exception as error:
                    hook.lose(error, depth)
            return result

        return hooked

    def _by_extension(self, hook: Hook, is_compiling: Callable[[], bool]) -> Around:
        call = native.compiled.Call(
            hook, self._state, self._enter, self._leave, self._state.guard.__exit__
        )
        return by_extension(call, is_compiling)

    def _finish(self) -> None:
        """Write how often each launch of this forward happened."""
        if self._launches:
            for launch in self._launches:
                self._complete(launch, 0)
            self._launches.clear()
            self._last = self._now = None

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by FlashMLA's names."""
        if args:
            kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if self._aliased:
            kwargs = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
        return kwargs

    def _keep(self, enter_seq: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._kept is not None:
            self._kept(enter_seq, self._by_name(args, kwargs))

    def _enter(self, *args: Any, **kwargs: Any) -> Frame:
        given = self._by_name(args, kwargs)
        running = self._running
        shapes = [None if value is None else value.shape for value in map(given.get, _SHAPED)]
        # What tells one launch of a forward from another.
        seen = (running[-1].enter_seq if running else -1, *shapes)
        for launch in self._launches:
            if launch.seen == seen:
                break
        else:
            launch = None
        if launch is None:
            launch = self._now = self._first(seen, shapes, given)
        else:
            launch.count += 1
            self._running.append(launch.frame)
        launch.remember(given)
        self._last = launch
        return launch.frame

    def _leave(self, frame: Frame, result: Any) -> None:
        """The first call of a shape has ended."""
        launch, self._now = self._now, None
        if launch is None:
            return
        state = self._state
        launch.exit_seq = state.seq
        state.seq += 1
        if self._metadata and isinstance(result, tuple) and len(result) == 2:
            launch.extra_pairs = (_SPLITS, rows_of(result[1]))

    def _first(self, seen: tuple[Any, ...], shapes: list[Any], given: dict[str, Any]) -> _Launch:
        """Record a launch with shapes this forward had not; they are those of _SHAPED."""
        state = self._state
        inside = self._running[-1] if self._running else None
        frame = state.enter(self._name, state.enclosing_record())
        frame.failed = self._call_failed
        launch = _Launch(frame, seen, inside)
        frame.subject = launch
        self._launches.append(launch)
        q, splits, cache_seqlens, block_table, indices, k_cache = shapes
        split_rows = _rows(splits)
        tiles = given.get("tile_scheduler_metadata")
        if splits is None and tiles is not None and not hasattr(tiles, "shape"):
            split_rows = rows_of(getattr(tiles, "num_splits", None))
            tiles = getattr(tiles, "tile_scheduler_metadata", None)
        values: list[int] = []
        for shape in (q, block_table, indices, k_cache):
            if shape is not None:
                values += shape
        own = (
            self._function,
            NONE_CODE if q is None else len(q),
            self._dtype(given.get("q")),
            split_rows,
            rows_of(tiles),
            _rows(cache_seqlens),
            NONE_CODE if block_table is None else len(block_table),
            NONE_CODE if indices is None else len(indices),
            NONE_CODE if k_cache is None else len(k_cache),
            self._dtype(given.get("k_cache")),
            integer_of(given.get("head_dim_v")),
            integer_of(given.get("is_fp8_kvcache")),
            1,
            NOT_OBSERVED_CODE,
            self._backends.plan_of(given.get("num_splits")),
        )
        state.event(LAUNCH, frame, NOT_OBSERVED_CODE, own, values)
        if self._metadata:
            note_planned_rows(inside, _rows(cache_seqlens))
        elif self._alarm is not None and q is not None and split_rows >= 0:
            self._alarm.launch(self._name, frame.record, _rows(q), split_rows)
        if self._kept is not None:
            self._kept(frame.enter_seq, given)
        return launch

    def _call_failed(self, frame: Frame, observed: bool) -> None:
        launch: _Launch = frame.subject
        state = self._state
        if observed and launch.exit_seq == NOT_OBSERVED_CODE:
            launch.exit_seq = state.seq
            state.seq += 1
        self._complete(launch, 1)
        if launch in self._launches:
            self._launches.remove(launch)
        self._last = self._now = None

    def _complete(self, launch: _Launch, failed: int) -> None:
        self._state.writer.count(self._number, launch.count)
        pairs = (EXIT_SEQ, launch.exit_seq, _COUNT, launch.count, _FAILED, failed)
        self._context.update(LAUNCH, launch.frame.enter_seq, pairs + launch.extra_pairs)
        # The two refer to each other, and would hold the last tensors until a collection.
        launch.frame.subject = None

    def _dtype(self, tensor: Any) -> int:
        dtype = getattr(tensor, "dtype", None)
        if dtype is None:
            return NONE_CODE
        found = self._dtypes.get(dtype)
        if found is None:
            found = self._dtypes[dtype] = self._context.string(str(dtype))
        return found


def _shape(value: Any) -> Any:
    return None if value is None else value.shape


def _rows(shape: Any) -> int:
    """The first of the sizes of a tensor, given its shape."""
    if shape is None:
        return NONE_CODE
    return shape[0] if shape else NOT_OBSERVED_CODE
