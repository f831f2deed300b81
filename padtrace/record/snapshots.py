"""The rows and host integers of a ForwardBatch at one moment, in about the time of a few C calls.

A batch has some fifty fields and is looked at up to seven times in a forward, mostly unchanged. So
the raw attribute values are fetched in one call and compared by identity with those of the last
look; only what is another object now is turned into a number again. Lists are compared by content,
since SGLang edits them in place. Nothing here reads a value of a device tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from operator import attrgetter, is_not, itemgetter
from typing import Any

from padtrace.record import native
from padtrace.record.native import Snapshot
from padtrace.record.values import (
    NO_LENGTHS,
    Convert,
    integer_of,
    lengths_of,
    namer,
    rows_of,
    width_of,
)
from padtrace.recording import schema
from padtrace.recording.absent import NO_ATTRIBUTE_CODE, NONE_CODE, NOT_OBSERVED_CODE

_NAMES = schema.SNAPSHOT.names()
_POSITION = {name: index for index, name in enumerate(_NAMES)}
_SPEC = "spec_info."
_SPEC_CLASS = _POSITION["spec_info"]
_MAX, _SUM = _POSITION["seq_lens_cpu.max"], _POSITION["seq_lens_cpu.sum"]
MODE, BATCH_SIZE = _POSITION["forward_mode"], _POSITION["batch_size"]
TOKEN_ROWS = _POSITION["input_ids.rows"]
METADATA_READY = _POSITION["forward_metadata_ready"]
REPLAN_EQUIVALENT = _POSITION["forward_metadata_replan_equivalent"]
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
# How many forwards start from the same usual values before they are looked up again.
_REFRESH = 64
_MISSING = object()
_ODD = object()
_LIMIT = 1 << 63


class Look:
    """One look at one object: its snapshot, and what it saw, to compare the next look with.

    Attributes:
        owner, raw, copies, counts, spec_raw: whose attributes were looked at, the values as they
            are, the vectors by content and the other lists by length (both change in place), and
            the values of the speculative input.
    """

    __slots__ = ("copies", "counts", "owner", "raw", "snapshot", "spec_raw")

    owner: Any
    raw: tuple[Any, ...]
    copies: tuple[Any, ...]
    counts: list[int]
    spec_raw: tuple[Any, ...]

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot


class _SpecReader:
    """Reads the columns `spec_info.*` of one class of speculative input."""

    __slots__ = ("_get", "codes", "converters", "names", "places")

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
        self.names = names
        # The class makes a change of it show, and a tuple of even one attribute or none.
        self._get = attrgetter("__class__", "__class__", *names)

    def get(self, spec: Any) -> tuple[Any, ...]:
        """The class, twice, and the values; SGLang sets some attributes on some objects only."""
        try:
            found: tuple[Any, ...] = self._get(spec)
        except AttributeError:
            kind = spec.__class__
            found = (kind, kind, *(getattr(spec, name, _MISSING) for name in self.names))
        return found

    def fill(self, scalars: list[int], raw: tuple[Any, ...]) -> None:
        """Put the columns of one speculative input in; `raw` is what `get` gave."""
        for place, code in self.codes.items():
            scalars[place] = code
        for place, convert, value in zip(self.places, self.converters, raw[2:], strict=True):
            scalars[place] = NO_ATTRIBUTE_CODE if value is _MISSING else convert(value)


def attribute_of(column: str, there: Collection[str]) -> str:
    """The attribute of ForwardBatch that a column is read from, by the name this release has."""
    names = _ATTRIBUTES.get(column, (column.removesuffix(".rows"),))
    return next((name for name in names if name in there), names[0])


class SnapshotTaker:
    """Takes snapshots of ForwardBatch objects and of what SGLang passes in their place.

    Attributes:
        take: the snapshot of a batch; the very same object as last time if nothing changed. Any
            object with some of the attributes will do; a partial one takes longer.
        forget: lets go of the objects of the last looks, so that no tensor lives longer than
            without us.
        looker: the object of the extension that does both, where it is there.
    """

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
        tensors = [column for column in present if column[2] is rows_of and column not in counted]
        plain = [c for c in present if c not in vectors and c not in counted and c not in tensors]
        ordered = tensors + plain + vectors + counted
        self._attributes = [attribute for attribute, _, _ in ordered]
        self._places = [place for _, place, _ in ordered]
        self._converters = [convert for _, _, convert in ordered]
        self._tensor_count = len(tensors)
        self._plain_count = first = len(tensors) + len(plain)
        self._list_places = self._places[first:]
        self._vectors = slice(first, first + len(vectors))
        self._counted = slice(first + len(vectors), len(ordered))
        self._mirror = self._attributes.index("seq_lens_cpu")
        self._indices = range(len(ordered) + 1)
        # The last one fetched is the speculative input, which has columns of its own.
        self._get = itemgetter(*self._attributes, "spec_info")
        self._nothing = self._start = self._nothing_seen(len(vectors), len(counted))
        self._looks = [self._start, self._start]
        self._last = self._forwards = 0
        self.take: Callable[[Any], Snapshot] = self._take
        self.forget: Callable[[], None] = self._forget
        self.looker: Any = None
        if native.compiled is not None:
            self.looker = looker = self._compiled(native.compiled)
            self.take, self.forget = looker.take, looker.forget

    def _compiled(self, module: Any) -> Any:
        """What takes snapshots in the place of this object, where the extension is there."""
        pairs: list[tuple[int, int]] = []
        for place, convert in zip(self._places, self._converters, strict=True):
            column = schema.SNAPSHOT.columns[place]
            conversion = _conversion(convert)
            if column.name in _VECTORS:
                conversion = module.VECTOR
            elif column.name in _COUNTED:
                conversion = module.COUNTED
            elif column.type is schema.ColumnType.STRING:
                conversion = module.NAME
            pairs.append((place, conversion))

        def describe(spec: Any) -> tuple[tuple[Any, ...], ...]:
            reader = self._spec_reader(spec)
            kinds = map(_conversion, reader.converters)
            spec_pairs = tuple(zip(reader.places, kinds, strict=True))
            codes = tuple(reader.codes.items())
            return codes, tuple(reader.names), spec_pairs, tuple(reader.converters)

        return module.Looker(
            names=tuple(self._attributes),
            pairs=tuple(pairs),
            converters=tuple(self._converters),
            blank=self._blank,
            mirror=self._mirror,
            lengths=(_MAX, _SUM),
            tensor_type=_tensor_type(),
            lengths_of=lengths_of,
            partial=self._take_partial,
            describe=describe,
        )

    def _nothing_seen(self, vectors: int, counted: int) -> Look:
        """What the first look starts from: an object in which everything is None."""
        scalars = self._blank.copy()
        for place in self._places:
            scalars[place] = NONE_CODE
        scalars[_MAX], scalars[_SUM] = NO_LENGTHS
        reader = self._spec_reader(None)
        nothing = Look(Snapshot(scalars, []))
        nothing.owner = None
        nothing.raw = (None,) * len(self._indices)
        nothing.copies = (None,) * vectors
        nothing.counts = [NONE_CODE] * counted
        nothing.spec_raw = reader.get(None)
        reader.fill(scalars, nothing.spec_raw)
        return nothing

    def _forget(self) -> None:
        if self._forwards % _REFRESH == 0:
            self._start = self._usual(self._looks[self._last])
        self._forwards += 1
        self._looks = [self._start, self._start]
        self._last = 0

    def _usual(self, look: Look) -> Look:
        """A start for the next looks: plain values as they were, no tensor and no list."""
        nothing = self._nothing
        scalars = nothing.snapshot.scalars.copy()
        usual = Look(Snapshot(scalars, []))
        usual.owner = None
        usual.copies, usual.counts = nothing.copies, nothing.counts
        usual.spec_raw = nothing.spec_raw
        raw = list(nothing.raw)
        for i in range(self._tensor_count, self._plain_count):
            if isinstance(look.raw[i], int):
                raw[i] = look.raw[i]
                scalars[self._places[i]] = look.snapshot.scalars[self._places[i]]
        usual.raw = tuple(raw)
        return usual

    def _take(self, batch: Any) -> Snapshot:
        fields = batch.__dict__
        try:
            raw = self._get(fields)
        except KeyError:
            return self._take_partial(batch)
        look = self._looks[self._last]
        if look.owner is not fields:
            # SGLang goes back and forth between a batch and its padded copy.
            self._last = 1 - self._last
            if self._looks[self._last].owner is fields:
                look = self._looks[self._last]
        changed = list(compress(self._indices, map(is_not, raw, look.raw)))
        if changed or look.owner is not fields:
            return self._look_again(fields, raw, look, changed)
        spec = raw[-1]
        if spec is not None:
            spec_raw = self._spec_readers[spec.__class__].get(spec)
            if any(map(is_not, spec_raw, look.spec_raw)):
                return self._look_again(fields, raw, look, changed)
        # The very lists that were checked when first seen, so only integers are compared here.
        if raw[self._vectors] != look.copies or self._counts(raw) != look.counts:
            return self._look_again(fields, raw, look, changed)
        return look.snapshot

    def _look_again(
        self, fields: dict[str, Any], raw: tuple[Any, ...], before: Look, changed: list[int]
    ) -> Snapshot:
        """Convert what is another object now, starting from an earlier look."""
        scalars, values = before.snapshot.scalars.copy(), before.snapshot.values
        lists_changed = self._convert(raw, changed, scalars)
        mirror = raw[self._mirror]
        if mirror is not before.raw[self._mirror]:
            scalars[_MAX], scalars[_SUM] = NO_LENGTHS if mirror is None else lengths_of(mirror)
        vectors, copies, counts = raw[self._vectors], before.copies, self._counts(raw)
        if lists_changed or vectors != copies or counts != before.counts:
            copies = tuple([_copy(vector) for vector in vectors])
            values = self._fill_lists(scalars, copies, counts)
        spec, spec_raw = raw[-1], before.spec_raw
        if spec is not None or before.raw[-1] is not None:
            reader = self._spec_readers.get(spec.__class__) or self._spec_reader(spec)
            spec_raw = reader.get(spec)
            reader.fill(scalars, spec_raw)
        # Other objects of the same sizes are no other snapshot, and need no other record.
        same = scalars == before.snapshot.scalars and values == before.snapshot.values
        look = Look(before.snapshot if same else Snapshot(scalars, values))
        look.owner, look.raw = fields, raw
        look.copies, look.counts, look.spec_raw = copies, counts, spec_raw
        self._looks[self._last] = look
        return look.snapshot

    def _convert(self, raw: tuple[Any, ...], changed: list[int], scalars: list[int]) -> bool:
        """Convert the attributes at these indices; whether a list is among them."""
        places, converters = self._places, self._converters
        tensors, plain = self._tensor_count, self._plain_count
        for i in changed:
            value = raw[i]
            if value is None:
                if i >= plain:
                    return True
                scalars[places[i]] = NONE_CODE
            elif i < tensors:
                try:
                    scalars[places[i]] = value.shape[0]
                except (AttributeError, IndexError, TypeError):
                    scalars[places[i]] = rows_of(value)
            elif i < plain:
                scalars[places[i]] = converters[i](value)
            else:
                return True
        return False

    def _counts(self, raw: tuple[Any, ...]) -> list[int]:
        return [NONE_CODE if v is None else len(v) for v in raw[self._counted]]

    def _fill_lists(
        self, scalars: list[int], copies: tuple[Any, ...], counts: list[int]
    ) -> list[int]:
        values: list[int] = []
        places = iter(self._list_places)
        for content in copies:
            place = next(places)
            if content is None:
                scalars[place] = NONE_CODE
            elif content.__class__ is list:
                scalars[place] = len(content)
                values += content
            else:
                scalars[place] = NOT_OBSERVED_CODE
        for count in counts:
            scalars[next(places)] = count
        return values

    def _take_partial(self, batch: Any) -> Snapshot:
        """Of an object that has only some of the attributes, such as a graph runner's view."""
        scalars, values = self._blank.copy(), list[int]()
        value: Any
        for attribute, place, convert in self._columns:
            value = getattr(batch, attribute, _MISSING)
            if value is _MISSING:
                continue
            if _is_integers(value):
                scalars[place] = len(value)
                if _NAMES[place] in _VECTORS:
                    values += value
            else:
                scalars[place] = convert(value)
        mirror = getattr(batch, "seq_lens_cpu", None)
        scalars[_MAX], scalars[_SUM] = NO_LENGTHS if mirror is None else lengths_of(mirror)
        spec = getattr(batch, "spec_info", None)
        reader = self._spec_reader(spec)
        reader.fill(scalars, reader.get(spec))
        return Snapshot(scalars, values)

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


def compiled_columns(
    attributes: Sequence[str], places: Sequence[int], converters: Sequence[Convert], width: int
) -> Any:
    """What the extension reads attributes of one class of objects with, into places of an array.

    Args:
        width: length of the array at least.
    """
    return native.compiled.Looker(
        names=tuple(attributes),
        pairs=tuple(zip(places, map(_conversion, converters), strict=True)),
        converters=tuple(converters),
        blank=[0] * width,
        mirror=0,
        lengths=(0, 0),
        tensor_type=_tensor_type(),
        lengths_of=None,
        partial=None,
        describe=None,
    )


def _conversion(convert: Convert) -> int:
    """What the extension calls a conversion."""
    module = native.compiled
    known: dict[Convert, int] = {rows_of: module.ROWS, integer_of: module.INTEGER}
    return known.get(convert, int(module.ANY))


def _tensor_type() -> Any:
    return getattr(sys.modules.get("torch"), "Tensor", None)


def _copy(vector: Any) -> Any:
    """A list of integers by content; anything else but None is not looked into."""
    if vector is None:
        return None
    return vector[:] if _is_integers(vector) else _ODD


def _is_integers(value: Any) -> bool:
    """A list of plain integers that fit a column, or an empty one."""
    if value.__class__ is not list:
        return False
    if not value:
        return True
    plain = all(issubclass(kind, int) and kind is not bool for kind in {*map(type, value)})
    return plain and min(value) >= -_LIMIT and max(value) < _LIMIT
