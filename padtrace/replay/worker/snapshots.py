"""Reads one ForwardBatch into a snapshot: rows and host-held integers, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from operator import is_not, itemgetter
from typing import Any

from padtrace.recording import schema
from padtrace.recording.absent import Absent
from padtrace.recording.model import Snapshot, Value
from padtrace.replay.worker.standins import Unobserved

_MISSING = object()

# Where a release calls an attribute otherwise.
ALIASES = {
    "can_run_dp_cuda_graph": ("can_run_decode_cuda_graph",),
    "can_run_dp_breakable_cuda_graph": ("can_run_dp_prefill_cuda_graph",),
    "num_token_non_padded_cpu": ("global_num_token_non_padded_cpu",),
    "original_forward_mode": ("_original_forward_mode",),
    "original_batch_size": ("_original_batch_size",),
    "original_num_tokens": ("_original_num_tokens",),
}
# What changes in place comes last, in this order.
_IN_PLACE = {"list": 1, "vector": 2}
_NoneType = type(None)
_Column = tuple[str, str, str]
_Reader = Callable[[Any], Value]


def _kind(column: schema.Column) -> str:
    if column.name in ("mrope_positions.rows", "attn_cp_metadata.rows"):
        return column.name.removesuffix(".rows")
    if column.name in ("lora_ids.rows", "tbo_children"):
        return "list"
    return "rows" if column.name.endswith(".rows") else column.type.value


class SnapshotTaker:
    """Takes snapshots of the batches of one release, quickly where little has changed.

    Attributes are converted again only where they are another object than at the last look, at
    whatever batch that was; what can change in place is compared by content.

    Args:
        batch_class: ForwardBatch of the release.
        cp_rank: attention context-parallel rank of the process.
    """

    def __init__(self, batch_class: Any, cp_rank: int) -> None:
        self._cp_rank = cp_rank
        there = set(getattr(batch_class, "__dataclass_fields__", ())) | set(vars(batch_class))
        self._readers: dict[str, _Reader] = {
            "rows": rows,
            "list": rows,
            "vector": integers,
            "int": int,
            "bool": int,
            "string": lambda value: str(getattr(value, "name", value)),
            "mrope_positions": lambda value: int(value.shape[1]),
            "attn_cp_metadata": self._shard_rows,
        }
        columns, self._spec = self._sorted_columns(there)
        kinds = [kind for _, kind, _ in columns]
        first_list, vectors = kinds.index("list"), kinds.index("vector")
        self._names = [attribute for _, _, attribute in columns] + ["spec_info", "seq_lens_cpu"]
        self._get = itemgetter(*self._names)
        self._columns = [(column, self._readers[kind]) for column, kind, _ in columns]
        self._plain = range(first_list)
        self._counted = range(first_list, vectors)
        self._vectors = slice(vectors, len(columns))
        of_spec = ("spec_info", *(column for column, _, _ in self._spec))
        self._without_spec: Snapshot = dict.fromkeys(of_spec)
        self._unobserved_spec: Snapshot = dict.fromkeys(of_spec, Absent.NOT_OBSERVED)
        self._last_spec: tuple[Any, list[Any], Snapshot] = (None, [], {})
        self._told_spec: Snapshot | None = None
        self._raw: tuple[Any, ...] = (object(),) * len(self._names)
        self._vector_types: list[type] | None = None
        self._vector_copies: tuple[Any, ...] = ()
        self._lengths: Any = _MISSING
        self._snapshot: Snapshot = {}

    def _sorted_columns(self, there: set[str]) -> tuple[list[_Column], list[_Column]]:
        """Column, kind and attribute: those of the batch, lists last; those of `spec_info`."""
        columns: list[_Column] = []
        of_spec: list[_Column] = []
        for column in schema.SNAPSHOT.columns:
            name = column.name.removesuffix(".rows")
            if column.name in ("spec_info", "seq_lens_cpu.max", "seq_lens_cpu.sum"):
                continue
            if name.startswith("spec_info."):
                of_spec.append((column.name, _kind(column), name.removeprefix("spec_info.")))
                continue
            found = [option for option in (name, *ALIASES.get(name, ())) if option in there]
            # What no class declares may still be set on the object, as old releases do.
            attribute = found[0] if found else ALIASES.get(name, (name,))[0]
            columns.append((column.name, _kind(column), attribute))
        columns.sort(key=lambda column: _IN_PLACE.get(column[1], 0))
        return columns, of_spec

    def take(self, batch: Any) -> Snapshot:
        """The snapshot of `batch` now; the very same object as last time if nothing changed."""
        try:
            raw = self._get(batch.__dict__)
        except KeyError:
            raw = tuple([getattr(batch, name, _MISSING) for name in self._names])
        now: Snapshot = {}
        columns, before = self._columns, self._snapshot
        for index in compress(self._plain, map(is_not, raw, self._raw)):
            column, reader = columns[index]
            now[column] = _read(reader, raw[index])
        for index in self._counted:
            if raw[index] is not None or self._raw[index] is not None:
                now[columns[index][0]] = _read(rows, raw[index])
        self._look_at_vectors(raw[self._vectors], now)
        self._look_at_lengths(raw[-1], now)
        spec = self._speculative(raw[-2])
        if spec is not self._told_spec:
            now.update(spec)
            self._told_spec = spec
        if now and any(before.get(column, _MISSING) != value for column, value in now.items()):
            self._snapshot = before = {**before, **now}
        self._raw = raw
        return before

    def _look_at_vectors(self, vectors: tuple[Any, ...], snapshot: Snapshot) -> None:
        """Lists of integers, by content, since SGLang edits them in place."""
        types = [*map(type, vectors)]
        if types == self._vector_types and vectors == self._vector_copies:
            return
        for (column, reader), value in zip(self._columns[self._vectors], vectors, strict=True):
            snapshot[column] = _read(reader, value)
        comparable = set(types) <= {list, _NoneType}
        self._vector_types = types if comparable else None
        self._vector_copies = tuple([v[:] if v.__class__ is list else v for v in vectors])

    def _look_at_lengths(self, lengths: Any, snapshot: Snapshot) -> None:
        """Maximum and sum of the host mirror, a tensor that may be edited in place."""
        if lengths is None:
            listed: Any = None
        elif lengths.__class__ is Unobserved:
            listed = Absent.NOT_OBSERVED
        else:
            listed = lengths.tolist()
        if listed == self._lengths:
            return
        self._lengths = listed
        longest = total = listed
        if listed.__class__ is list:
            longest, total = max(listed, default=0), sum(listed)
        snapshot["seq_lens_cpu.max"], snapshot["seq_lens_cpu.sum"] = longest, total

    def _speculative(self, spec: Any) -> Snapshot:
        """The columns of the speculative input; the same object as last time if nothing changed."""
        if isinstance(spec, Unobserved):
            return self._unobserved_spec
        if spec is None:
            return self._without_spec
        raw = [getattr(spec, name, _MISSING) for _, _, name in self._spec]
        owner, last, before = self._last_spec
        if owner is not spec or any(map(is_not, raw, last)):
            before = {
                column: _read(self._readers[kind], value)
                for (column, kind, _), value in zip(self._spec, raw, strict=True)
            }
            before["spec_info"] = type(spec).__name__
            self._last_spec = (spec, raw, before)
        return before

    def _shard_rows(self, metadata: Any) -> Value:
        """Tokens of this rank's shard, where the context-parallel metadata state them."""
        per_rank = getattr(metadata, "per_rank_actual_token", None)
        if per_rank is None:
            return Absent.NOT_OBSERVED
        return integers(per_rank)[self._cp_rank]


def _read(reader: _Reader, value: Any) -> Value:
    if value is None:
        return None
    if value is _MISSING:
        return Absent.NO_ATTRIBUTE
    if value.__class__ is Unobserved:
        return Absent.NOT_OBSERVED
    return reader(value)


def rows(value: Any) -> int:
    """shape[0] of a tensor (1 for a scalar), len() of a list."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return len(value)
    return int(shape[0]) if len(shape) else 1


def row_count(value: Any) -> int | None:
    """Rows of a tensor or list; None for None."""
    return None if value is None else rows(value)


def integers(value: Any) -> list[int]:
    """A list or a tensor as a list of plain integers."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    return [*map(int, listed)]
