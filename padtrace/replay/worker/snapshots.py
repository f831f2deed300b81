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
_MUTABLE = ("vector", "list")


def _kind(column: schema.Column) -> str:
    if column.name in ("mrope_positions.rows", "attn_cp_metadata.rows"):
        return column.name.removesuffix(".rows")
    if column.name in ("lora_ids.rows", "tbo_children"):
        return "list"
    return "rows" if column.name.endswith(".rows") else column.type.value


class SnapshotTaker:
    """Takes snapshots of the batches of one release, quickly where little has changed.

    Args:
        batch_class: ForwardBatch of the release.
        cp_rank: attention context-parallel rank of the process.
    """

    def __init__(self, batch_class: Any, cp_rank: int) -> None:
        self._cp_rank = cp_rank
        there = set(getattr(batch_class, "__dataclass_fields__", ())) | set(vars(batch_class))
        self._columns: list[tuple[str, str, str]] = []
        self._spec: list[tuple[str, str, str]] = []
        for column in schema.SNAPSHOT.columns:
            name = column.name.removesuffix(".rows")
            if column.name in ("spec_info", "seq_lens_cpu.max", "seq_lens_cpu.sum"):
                continue
            if name.startswith("spec_info."):
                attribute = name.removeprefix("spec_info.")
                self._spec.append((column.name, _kind(column), attribute))
                continue
            found = [option for option in (name, *ALIASES.get(name, ())) if option in there]
            # What no class declares may still be set on the object, as old releases do.
            attribute = found[0] if found else ALIASES.get(name, (name,))[0]
            self._columns.append((column.name, _kind(column), attribute))
        self._without_spec: Snapshot = dict.fromkeys(("spec_info", *(c for c, _, _ in self._spec)))
        self._last_spec: tuple[Any, list[Any], Snapshot] = (None, [], {})
        self._told_spec: Snapshot | None = None
        self._names = [attribute for _, _, attribute in self._columns]
        self._get = itemgetter(*self._names)
        self._indices = range(len(self._columns))
        # Lists are looked at every time, since SGLang edits them in place.
        self._mutable = [i for i, (_, kind, _) in enumerate(self._columns) if kind in _MUTABLE]
        self._last: tuple[Any, tuple[Any, ...], Snapshot] = (None, (), {})
        self._readers: dict[str, Callable[[Any], Value]] = {
            "rows": rows,
            "list": rows,
            "vector": integers,
            "int": int,
            "bool": int,
            "string": lambda value: str(getattr(value, "name", value)),
            "mrope_positions": lambda value: int(value.shape[1]),
            "attn_cp_metadata": self._shard_rows,
        }

    def take(self, batch: Any) -> Snapshot:
        """The snapshot of `batch` now; the very same object as last time if nothing changed."""
        held = batch.__dict__
        try:
            raw = self._get(held)
        except KeyError:
            raw = tuple(getattr(batch, name, _MISSING) for name in self._names)
        owner, last, before = self._last
        if owner is held:
            changed = {*compress(self._indices, map(is_not, raw, last))}
            changed.update(index for index in self._mutable if raw[index] is not None)
        else:
            changed, before, self._told_spec = set(self._indices), {}, None
        now: Snapshot = {}
        for index in changed:
            column, kind, _ = self._columns[index]
            now[column] = self._read(kind, raw[index])
        self._lengths(batch.seq_lens_cpu, now)
        spec = self._speculative(batch.spec_info)
        if spec is not self._told_spec:
            now.update(spec)
            self._told_spec = spec
        if any(before.get(column, _MISSING) != value for column, value in now.items()):
            before = {**before, **now}
        self._last = (held, raw, before)
        return before

    def _read(self, kind: str, value: Any) -> Value:
        if value is None:
            return None
        if value is _MISSING:
            return Absent.NO_ATTRIBUTE
        if isinstance(value, Unobserved):
            return Absent.NOT_OBSERVED
        return self._readers[kind](value)

    def _lengths(self, lengths: Any, snapshot: Snapshot) -> None:
        longest: Value = None
        total: Value = None
        if isinstance(lengths, Unobserved):
            longest = total = Absent.NOT_OBSERVED
        elif lengths is not None:
            listed = lengths.tolist()
            longest, total = max(listed, default=0), sum(listed)
        snapshot["seq_lens_cpu.max"], snapshot["seq_lens_cpu.sum"] = longest, total

    def _speculative(self, spec: Any) -> Snapshot:
        """The columns of the speculative input; the same object as last time if nothing changed."""
        if isinstance(spec, Unobserved):
            return {"spec_info": Absent.NOT_OBSERVED}
        if spec is None:
            return self._without_spec
        raw = [getattr(spec, name, _MISSING) for _, _, name in self._spec]
        owner, last, before = self._last_spec
        if owner is not spec or any(map(is_not, raw, last)):
            before = {
                column: self._read(kind, value)
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
    return [int(item) for item in listed]
