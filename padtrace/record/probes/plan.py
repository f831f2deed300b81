"""Attention metadata: init_forward_metadata, its graph and multi-step relatives, their parts."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from padtrace.record.probes.context import UNSEEN, Context, exit_number
from padtrace.record.snapshots import compiled_columns
from padtrace.record.state import PLAN, Frame
from padtrace.record.values import Convert, integer_of, rows_of, width_of
from padtrace.recording import schema
from padtrace.recording.absent import NO_ATTRIBUTE_CODE, NONE_CODE, NOT_OBSERVED_CODE

_PLAN_NAMES = schema.EVENT_TABLES["plan"].names()
_OWN = _PLAN_NAMES[_PLAN_NAMES.index("entry") + 1 :]
_AT = {name: index for index, name in enumerate(_OWN)}
_PLANNED, _SPLITS = _AT["planned.rows"], _AT["num_splits.rows"]
_BUCKET = _AT["graph_bucket"]
_SLICE, _WANTED = _AT["num_splits_slice.rows"], _AT["num_splits_slice.wanted"]
# What the extension has to know: how many columns, and where some are.
_PLACES = (len(_OWN), _PLANNED, _SPLITS, _BUCKET)
_NOT_IN_METADATA = (_PLANNED, _SPLITS, _BUCKET, _SLICE, _WANTED)


class _Reader:
    """Reads the columns of a plan from one class of metadata."""

    __slots__ = ("_attributes", "_converters", "_get", "_places", "missing")

    def __init__(self, metadata: Any) -> None:
        self.missing: list[int] = []
        self._places: list[int] = []
        self._converters: list[Convert] = []
        self._attributes: list[str] = []
        for place, name in enumerate(_OWN):
            if place in _NOT_IN_METADATA:
                continue
            attribute = name.removesuffix(".rows").removesuffix(".width")
            if attribute.startswith("dsa_") and not hasattr(metadata, attribute):
                attribute = f"n{attribute[1:]}"  # SGLang 0.5.12 says nsa
            if not hasattr(metadata, attribute):
                self.missing.append(place)
                continue
            self._attributes.append(attribute)
            self._places.append(place)
            self._converters.append(_converter(name))
        # The class makes it a tuple of even one attribute or none.
        self._get = attrgetter("__class__", "__class__", *self._attributes)

    def compiled(self) -> Any:
        """What the extension reads the same columns with."""
        return compiled_columns(self._attributes, self._places, self._converters, len(_OWN))

    def read(self, metadata: Any, own: list[int]) -> None:
        for place in self.missing:
            own[place] = NO_ATTRIBUTE_CODE
        values = iter(self._get(metadata))
        next(values), next(values)
        for place, convert, value in zip(self._places, self._converters, values, strict=True):
            if value is None:
                own[place] = NONE_CODE
            elif convert is rows_of and value.__class__ is not list:
                try:
                    own[place] = value.shape[0]
                except (AttributeError, IndexError, TypeError):
                    own[place] = rows_of(value)
            else:
                own[place] = convert(value)


class PlanProbe:
    """One planning method of an attention backend.

    A method that the same backend object calls while it plans is part of the enclosing event.
    """

    def __init__(
        self, context: Context, function: str, finish_launches: Callable[[], None]
    ) -> None:
        """
        Args:
            function: name of the method, which also says how its arguments are to be read.
            finish_launches: writes the counts of launches made outside any forward.
        """
        self._context = context
        self._state = context.state
        self._name = function
        self._function = context.string(function)
        self._graph = "graph" in function
        self._finish_launches = finish_launches
        self._backends = backends_of(context)
        self._by: dict[type, str] = {}
        backends = self._backends
        context.compile(
            self,
            "plan",
            function,
            self._function,
            finish=finish_launches,
            describe=backends.name_and_number,
            more=backends.describe,
            flag=self._graph,
            places=_PLACES,
        )

    def enter(self, backend: Any, *args: Any, **kwargs: Any) -> Frame | None:
        state, context = self._state, self._context
        running = state.open
        if running and running[-1].subject_is(backend):
            return None
        batch, bucket = _batch_and_bucket(args, kwargs)
        if batch is None:
            record, entry = state.enclosing_record(), UNSEEN
        else:
            record, entry = context.record_of(batch), context.snap(batch)
        frame = state.enter(self._name, record)
        frame.subject = backend
        frame.failed = self._failed
        frame.kind = PLAN
        frame.entry = entry
        frame.numbers = [NOT_OBSERVED_CODE] * len(_OWN)
        if self._graph:
            frame.put(_BUCKET, bucket)
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        exit_seq = self._state.leave(frame)
        own = frame.numbers
        backend = frame.subject
        self._backends.read(backend, own)
        if own[_SPLITS] > 0:
            by = self._by.get(backend.__class__)
            if by is None:
                by = f"{type(backend).__name__}.{self._name}"
                self._by[backend.__class__] = by
            frame.record.planned(by, frame.enter_seq, own[_PLANNED], own[_SPLITS])
            self._backends.planned(backend, frame.enter_seq)
        self._write(frame, exit_seq)
        if not self._state.open:
            self._finish_launches()

    def _failed(self, frame: Frame, observed: bool) -> None:
        self._write(frame, exit_number(self._context, frame, observed))

    def _write(self, frame: Frame, exit_seq: int) -> None:
        name, number = self._backends.name_and_number(frame.subject)
        own = [name, number, self._function, self._context.keep(frame.entry), *frame.numbers]
        self._state.event(PLAN, frame, exit_seq, own)


class Backends:
    """Numbers the backend objects and knows how to read each class of metadata."""

    def __init__(self, context: Context) -> None:
        self._string = context.string
        # Keeping the backend keeps its id from being given to another; they live as long as we do.
        self._known: dict[int, tuple[Any, tuple[int, int]]] = {}
        # By number of the backend: its num_splits, which it keeps itself, and the plan's number.
        self._made: dict[int, tuple[Any, int]] = {}
        self._readers: dict[type, _Reader] = {}

    def forget(self) -> None:
        """Let the backends of a process go that is looked at no more."""
        self._known.clear()
        self._made.clear()

    def planned(self, backend: Any, enter_seq: int) -> None:
        """This backend's num_splits are those of the plan `enter_seq` now."""
        splits = _splits_of(getattr(backend, "forward_metadata", None))
        if splits is not None:
            self._made[self.name_and_number(backend)[1]] = (splits, enter_seq)

    def plan_of(self, splits: Any) -> int:
        """The number of the plan that made this very tensor."""
        if splits is not None:
            for made, enter_seq in self._made.values():
                if made is splits:
                    return enter_seq
        return NOT_OBSERVED_CODE

    def name_and_number(self, backend: Any) -> tuple[int, int]:
        known = self._known.get(id(backend))
        if known is None:
            pair = (self._string(type(backend).__name__), len(self._known))
            known = self._known[id(backend)] = (backend, pair)
        return known[1]

    def read(self, backend: Any, own: list[int]) -> None:
        """Fill in the rows of `backend.forward_metadata`, if it has one."""
        metadata = getattr(backend, "forward_metadata", None)
        if metadata is None:
            return
        self._reader(metadata).read(metadata, own)
        splits = num_splits_rows(metadata)
        if splits != NOT_OBSERVED_CODE or own[_SPLITS] == NOT_OBSERVED_CODE:
            own[_SPLITS] = splits

    def _reader(self, metadata: Any) -> _Reader:
        reader = self._readers.get(type(metadata))
        if reader is None:
            reader = self._readers[type(metadata)] = _Reader(metadata)
        return reader

    def describe(self, metadata: Any) -> tuple[Any, ...]:
        """How a class of metadata is read, for the extension: columns absent, columns there."""
        reader = self._reader(metadata)
        return tuple(reader.missing), reader.compiled()


def backends_of(context: Context) -> Backends:
    """The one Backends of a process."""
    if context.backends is None:
        context.backends = Backends(context)
    found: Backends = context.backends
    return found


def num_splits_rows(metadata: Any) -> int:
    """Length of num_splits wherever a backend keeps it."""
    if getattr(metadata, "flashmla_metadata", metadata) is None:
        return NONE_CODE
    shape = getattr(_splits_of(metadata), "shape", None)
    return shape[0] if shape else NOT_OBSERVED_CODE


def _splits_of(metadata: Any) -> Any:
    """The tensor num_splits, or None.

    The DSA backend has it in `flashmla_metadata`, newer FlashMLA inside a scheduler object there,
    the dense FlashMLA backend in the metadata itself (where FlashAttention has a plain number).
    """
    holder = getattr(metadata, "flashmla_metadata", metadata)
    splits = getattr(holder, "num_splits", None)
    if splits is None:
        inner = getattr(holder, "flashmla_metadata", None)
        splits = getattr(inner, "num_splits", None)
    if getattr(splits, "shape", None) is None:
        splits = getattr(metadata, "num_splits", None)
    return splits if getattr(splits, "shape", None) else None


class FlashMLAMetadataWatch:
    """`_compute_flashmla_metadata(cache_seqlens, seq_len_q)`: the rows the plan was made for."""

    def __init__(self, context: Context) -> None:
        self._open = context.state.open
        self.after: Callable[..., None] = self._after
        core = context.compiled("flashmla", "_compute_flashmla_metadata", places=_PLACES)
        if core is not None:
            self.after = core.enter

    def _after(
        self, result: Any, backend: Any, cache_seqlens: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        plan = _enclosing_plan(self._open)
        if plan is not None:
            plan.put(_PLANNED, rows_of(cache_seqlens))
            plan.put(_SPLITS, num_splits_rows(result))


class SliceWatch:
    """`DSAFlashMLAMetadata.slice(sli)`: the part of num_splits a graph bucket gets."""

    def __init__(self, context: Context) -> None:
        self._open = context.state.open

    def after(self, result: Any, metadata: Any, sli: Any = None, *args: Any, **kw: Any) -> None:
        plan = _enclosing_plan(self._open)
        if plan is None or not isinstance(sli, slice):
            return
        plan.put(_SLICE, rows_of(getattr(result, "num_splits", None)))
        if isinstance(sli.stop, int):
            plan.put(_WANTED, sli.stop - (sli.start or 0))


def note_planned_rows(plan: Frame | None, rows: int) -> None:
    """The rows given to get_mla_metadata, where no method of the backend told them before."""
    if plan is not None and plan.kind == PLAN and plan.get(_PLANNED) == NOT_OBSERVED_CODE:
        plan.put(_PLANNED, rows)


def _enclosing_plan(running: list[Frame]) -> Frame | None:
    return running[-1] if running and running[-1].kind == PLAN else None


def _batch_and_bucket(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """The batch given to a planning method, and its batch size where it is a captured one.

    Methods take a batch first, or the bare batch size (older replay methods, precomputed plans).
    """
    first = args[0] if args else kwargs.get("forward_batch", kwargs.get("bs"))
    if isinstance(first, int):
        return None, first
    if len(args) > 1 and type(args[1]) is int:
        return first, args[1]
    return first, integer_of(getattr(first, "batch_size", None))


def _converter(name: str) -> Convert:
    if name.endswith(".rows"):
        return rows_of
    return width_of if name.endswith(".width") else integer_of
