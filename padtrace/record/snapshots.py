"""The rows and host integers of a ForwardBatch at one moment, in about the time of a few C calls.

A batch has some fifty fields and is looked at up to seven times in a forward, mostly unchanged. So
the raw attribute values are fetched in one call and compared by identity with those of the last
look; only what is another object now is turned into a number again. Lists are compared by content,
since SGLang edits them in place. Nothing here reads a value of a device tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import compress
from operator import attrgetter, is_not, itemgetter
from typing import Any

from padtrace.recording import schema
from padtrace.recording.absent import NO_ATTRIBUTE_CODE, NONE_CODE, NOT_OBSERVED_CODE

Convert = Callable[[Any], int]

_NAMES = schema.SNAPSHOT.names()
_POSITION = {name: index for index, name in enumerate(_NAMES)}
_SPEC = "spec_info."
_SPEC_CLASS = _POSITION["spec_info"]
_MAX, _SUM = _POSITION["seq_lens_cpu.max"], _POSITION["seq_lens_cpu.sum"]
MODE, BATCH_SIZE = _POSITION["forward_mode"], _POSITION["batch_size"]
TOKEN_ROWS = _POSITION["input_ids.rows"]
_DERIVED = ("spec_info", "seq_lens_cpu.max", "seq_lens_cpu.sum")
_VECTORS = tuple(c.name for c in schema.SNAPSHOT.columns if c.type is schema.ColumnType.VECTOR)
# Columns whose attribute has another name, in some release or in all.
_ATTRIBUTES = {
    "original_forward_mode": ("_original_forward_mode",),
    "original_batch_size": ("_original_batch_size",),
    "original_num_tokens": ("_original_num_tokens",),
    "can_run_dp_cuda_graph": ("can_run_dp_cuda_graph", "can_run_decode_cuda_graph"),
    "can_run_dp_breakable_cuda_graph": (
        "can_run_dp_breakable_cuda_graph",
        "can_run_dp_prefill_cuda_graph",
    ),
    "num_token_non_padded_cpu": ("num_token_non_padded_cpu", "global_num_token_non_padded_cpu"),
}
# Host lists of which only the length is kept; they grow in place.
_COUNTED = ("lora_ids.rows", "tbo_children")
# Below this a list of Python integers is cheaper than two reductions in torch.
_SHORT = 64
_MISSING = object()
_NO_LENGTHS = (NONE_CODE, NONE_CODE)
_UNKNOWN_LENGTHS = (NOT_OBSERVED_CODE, NOT_OBSERVED_CODE)

NO_SNAPSHOT = (NOT_OBSERVED_CODE,) * len(_NAMES)


class Snapshot:
    """One look: scalars in schema order, a vector's place holding its length, and the vectors."""

    __slots__ = ("scalars", "values")

    def __init__(self, scalars: list[int], values: list[int]) -> None:
        self.scalars = scalars
        self.values = values


class _Look:
    """What the last look at one object saw, with the objects themselves."""

    __slots__ = ("lengths", "lists", "owner", "raw", "snapshot", "spec_class", "spec_raw")

    def __init__(self, owner: Any, raw: tuple[Any, ...], snapshot: Snapshot) -> None:
        self.owner = owner
        self.raw = raw
        self.snapshot = snapshot
        self.lists: list[Any] = []
        self.lengths: tuple[int, int] | None = None
        self.spec_class: type | None = None
        self.spec_raw: tuple[Any, ...] = ()


class _SpecReader:
    """Reads the columns `spec_info.*` of one class of speculative input."""

    __slots__ = ("codes", "converters", "get", "places")

    def __init__(self, sample: Any, string: Callable[[str], int]) -> None:
        missing = NONE_CODE if sample is None else NO_ATTRIBUTE_CODE
        name_code = NONE_CODE if sample is None else string(type(sample).__name__)
        self.codes = {_SPEC_CLASS: name_code}
        names: list[str] = []
        self.places: list[int] = []
        self.converters: list[Convert] = []
        for name, place in _POSITION.items():
            if name.startswith(_SPEC):
                attribute = name.removeprefix(_SPEC).removesuffix(".rows")
                self.codes[place] = missing
                if hasattr(sample, attribute):
                    names.append(attribute)
                    self.places.append(place)
                    self.converters.append(rows_of if name.endswith(".rows") else integer_of)
        # The class itself makes it a tuple even for one attribute or none.
        self.get = attrgetter("__class__", "__class__", *names)


def attribute_of(column: str, there: Collection[str]) -> str:
    """The attribute of ForwardBatch that a column is read from, by the name this release has."""
    names = _ATTRIBUTES.get(column, (column.removesuffix(".rows"),))
    return next((name for name in names if name in there), names[0])


def rows_of(value: Any) -> int:
    """shape[0] of a tensor, len() of a list; a value of another kind was not observed."""
    if value is None:
        return NONE_CODE
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else NOT_OBSERVED_CODE
    return len(value) if isinstance(value, (list, tuple)) else NOT_OBSERVED_CODE


def width_of(value: Any) -> int:
    """shape[1] of a tensor with two dimensions or more."""
    if value is None:
        return NONE_CODE
    shape: Any = getattr(value, "shape", ())
    return int(shape[1]) if len(shape) > 1 else NOT_OBSERVED_CODE


def integer_of(value: Any) -> int:
    """A plain integer; never a tensor, whose value could only be had by waiting for the device."""
    if value is None:
        return NONE_CODE
    return int(value) if isinstance(value, int) else NOT_OBSERVED_CODE


def namer(string: Callable[[str], int]) -> Convert:
    """A converter of one enum class to string ids (an int enum equals those of other classes)."""
    known: dict[Any, int] = {}

    def name_of(value: Any) -> int:
        if value is None:
            return NONE_CODE
        found = known.get(value)
        if found is None:
            name = getattr(value, "name", None)
            known[value] = found = string(name) if isinstance(name, str) else NOT_OBSERVED_CODE
        return found

    return name_of


class SnapshotTaker:
    """Takes snapshots of ForwardBatch objects and of what SGLang passes in their place."""

    def __init__(
        self, forward_batch_class: type, string: Callable[[str], int], cp_rank: Callable[[], int]
    ) -> None:
        """
        Args:
            forward_batch_class: the class of this release; its fields tell which attributes exist.
            string: interns a string for the ring.
            cp_rank: attention context-parallel rank of this process.
        """
        self._string = string
        self._cp_rank = cp_rank
        self._spec_readers: dict[type, _SpecReader] = {}
        # Attribute, place in the snapshot, converter: of all columns that are one attribute.
        there = set(getattr(forward_batch_class, "__dataclass_fields__", ()))
        self._columns = [
            (attribute_of(column.name, there), place, self._converter(column))
            for place, column in enumerate(schema.SNAPSHOT.columns)
            if not column.name.startswith(_DERIVED)
        ]
        self._blank = [NO_ATTRIBUTE_CODE] * len(_NAMES)
        present = [column for column in self._columns if column[0] in there]
        vectors = [column for column in present if _NAMES[column[1]] in _VECTORS]
        counted = [column for column in present if _NAMES[column[1]] in _COUNTED]
        plain = [column for column in present if column not in vectors + counted]
        lists = vectors + counted
        self._vector_count = len(vectors)
        self._places = [place for _, place, _ in plain]
        self._converters = [convert for _, _, convert in plain]
        self._indices = range(len(plain))
        self._get = itemgetter(*(attribute for attribute, _, _ in plain))
        self._list_places = [place for _, place, _ in lists]
        self._list_attributes = [attribute for attribute, _, _ in lists]
        self._get_lists = itemgetter(*self._list_attributes)
        self.forget()

    def forget(self) -> None:
        """Let go of the objects of the last looks, so that no tensor lives longer than before."""
        nothing = _Look(None, (_MISSING,) * len(self._places), Snapshot(self._blank, []))
        self._looks = [nothing, nothing]
        self._last = 0

    def take(self, batch: Any) -> Snapshot:
        """The snapshot of a batch; the very same object as last time if nothing changed.

        Any object with some of the attributes will do; a partial one takes longer.
        """
        fields = batch.__dict__
        try:
            raw = self._get(fields)
            lists = self._get_lists(fields)
            spec, mirror = fields["spec_info"], fields["seq_lens_cpu"]
        except KeyError:
            return self._take_partial(batch)
        look = self._looks[self._last]
        if look.owner is not fields:
            self._last = 1 - self._last
            if self._looks[self._last].owner is fields:
                look = self._looks[self._last]
        scalars = None
        for i in compress(self._indices, map(is_not, raw, look.raw)):
            if scalars is None:
                scalars = look.snapshot.scalars.copy()
            scalars[self._places[i]] = self._converters[i](raw[i])
        contents = self._contents(lists)
        lengths = lengths_of(mirror) if mirror is not None else _NO_LENGTHS
        spec_class = spec.__class__
        reader = self._spec_readers.get(spec_class) or self._spec_reader(spec)
        spec_raw = reader.get(spec)
        same = (
            contents == look.lists
            and lengths == look.lengths
            and spec_class is look.spec_class
            and not any(map(is_not, spec_raw, look.spec_raw))
        )
        if same and scalars is None:
            if look.owner is fields:
                return look.snapshot
            snapshot = look.snapshot
        else:
            snapshot = Snapshot(scalars or look.snapshot.scalars.copy(), look.snapshot.values)
            if not same:
                self._fill(snapshot, contents, lengths, reader, spec_raw)
        self._remember(fields, raw, snapshot, contents, lengths, spec_class, spec_raw)
        return snapshot

    def _remember(
        self,
        fields: dict[str, Any],
        raw: tuple[Any, ...],
        snapshot: Snapshot,
        contents: list[Any],
        lengths: tuple[int, int],
        spec_class: type,
        spec_raw: tuple[Any, ...],
    ) -> None:
        look = _Look(fields, raw, snapshot)
        look.lists = contents
        look.lengths = lengths
        look.spec_class = spec_class
        look.spec_raw = spec_raw
        self._looks[self._last] = look

    def _fill(
        self,
        snapshot: Snapshot,
        contents: list[Any],
        lengths: tuple[int, int],
        reader: _SpecReader,
        spec_raw: tuple[Any, ...],
    ) -> None:
        """Put in the columns that are not simply one attribute."""
        scalars = snapshot.scalars
        values: list[int] = []
        for place, content in zip(self._list_places, contents, strict=True):
            if content.__class__ is list:
                scalars[place] = len(content)
                values += content
            else:
                scalars[place] = content
        snapshot.values = values
        scalars[_MAX], scalars[_SUM] = lengths
        for place, code in reader.codes.items():
            scalars[place] = code
        values_of_spec = spec_raw[2:]
        for place, convert, value in zip(
            reader.places, reader.converters, values_of_spec, strict=True
        ):
            scalars[place] = convert(value)

    def _contents(self, lists: tuple[Any, ...]) -> list[Any]:
        """Copies of the vectors, then the lengths of the lists that are only counted."""
        count = self._vector_count
        contents: list[Any] = [
            NONE_CODE if value is None else value[:] if _is_integers(value) else NOT_OBSERVED_CODE
            for value in lists[:count]
        ]
        for value in lists[count:]:
            contents.append(NONE_CODE if value is None else len(value))
        return contents

    def _take_partial(self, batch: Any) -> Snapshot:
        """Of an object that has only some of the attributes, such as a graph runner's view."""
        snapshot = Snapshot(self._blank.copy(), [])
        for attribute, place, convert in self._columns:
            value = getattr(batch, attribute, _MISSING)
            if value is not _MISSING and _NAMES[place] not in _VECTORS:
                snapshot.scalars[place] = convert(value)
        lists = tuple(getattr(batch, name, None) for name in self._list_attributes)
        mirror = getattr(batch, "seq_lens_cpu", None)
        lengths = _NO_LENGTHS if mirror is None else lengths_of(mirror)
        spec = getattr(batch, "spec_info", None)
        reader = self._spec_reader(spec)
        self._fill(snapshot, self._contents(lists), lengths, reader, reader.get(spec))
        for place, name in zip(self._list_places, self._list_attributes, strict=True):
            if not hasattr(batch, name):
                snapshot.scalars[place] = NO_ATTRIBUTE_CODE
        return snapshot

    def _spec_reader(self, spec: Any) -> _SpecReader:
        reader = self._spec_readers.get(spec.__class__)
        if reader is None:
            reader = self._spec_readers[spec.__class__] = _SpecReader(spec, self._string)
        return reader

    def _converter(self, column: schema.Column) -> Convert:
        if column.name == "attn_cp_metadata.rows":
            return self._shard_rows
        if column.name == "mrope_positions.rows":
            return width_of
        if column.type is schema.ColumnType.STRING:
            return namer(self._string)
        return rows_of if column.name.endswith(".rows") else integer_of

    def _shard_rows(self, metadata: Any) -> int:
        """Tokens of this rank's shard, from ContextParallelMetadata.per_rank_actual_token."""
        if metadata is None:
            return NONE_CODE
        counts = getattr(metadata, "per_rank_actual_token", None)
        rank = self._cp_rank()
        return integer_of(counts[rank]) if counts and rank < len(counts) else NOT_OBSERVED_CODE


def lengths_of(mirror: Any) -> tuple[int, int]:
    """Maximum and sum of seq_lens_cpu; read only if it is really on the host."""
    if not getattr(mirror, "is_cpu", False):
        return _UNKNOWN_LENGTHS
    if mirror.numel() > _SHORT:
        return int(mirror.max()), int(mirror.sum())
    values = mirror.tolist()
    return (max(values), sum(values)) if values else (0, 0)


def _is_integers(value: Any) -> bool:
    return value.__class__ is list and (not value or value[0].__class__ is int)
