"""Reads one ForwardBatch into a snapshot: rows and host-held integers, nothing else."""

from __future__ import annotations

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

_SPECIAL = frozenset(
    {
        "seq_lens_cpu.max",
        "seq_lens_cpu.sum",
        "mrope_positions.rows",
        "tbo_children",
        "attn_cp_metadata.rows",
        "spec_info",
    }
)


def _plain_columns() -> tuple[list[tuple[str, str, tuple[str, ...]]], list[tuple[str, str, str]]]:
    """(column, kind, attribute names) of the batch, and (column, kind, attribute) of spec_info."""
    batch: list[tuple[str, str, tuple[str, ...]]] = []
    spec: list[tuple[str, str, str]] = []
    for column in schema.SNAPSHOT.columns:
        if column.name in _SPECIAL:
            continue
        name, rows, _ = column.name.partition(".rows")
        kind = "rows" if rows else column.type.value
        if name.startswith("spec_info."):
            spec.append((column.name, kind, name.removeprefix("spec_info.")))
        else:
            batch.append((column.name, kind, (name, *ALIASES.get(name, ()))))
    return batch, spec


_BATCH_COLUMNS, _SPEC_COLUMNS = _plain_columns()


def take(batch: Any, cp_rank: int = 0) -> Snapshot:
    """The snapshot of `batch` now, as context-parallel rank `cp_rank` sees it; lists are copied."""
    snapshot: Snapshot = {}
    held = batch.__dict__
    for column, kind, names in _BATCH_COLUMNS:
        value = held.get(names[0], _MISSING)
        if value is _MISSING:
            value = _find(batch, names)
        snapshot[column] = _value(kind, value)
    _special(batch, snapshot, cp_rank)
    spec = batch.spec_info
    snapshot["spec_info"] = None if spec is None else type(spec).__name__
    for column, kind, name in _SPEC_COLUMNS:
        value = None if spec is None else getattr(spec, name, _MISSING)
        snapshot[column] = _value(kind, value)
    return snapshot


def _find(batch: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        value = getattr(batch, name, _MISSING)
        if value is not _MISSING:
            return value
    return _MISSING


def _value(kind: str, value: Any) -> Value:
    if value is None:
        return None
    if value is _MISSING:
        return Absent.NO_ATTRIBUTE
    if isinstance(value, Unobserved):
        return Absent.NOT_OBSERVED
    if kind == "rows":
        return rows(value)
    if kind == "vector":
        return integers(value)
    if kind == "string":
        return str(getattr(value, "name", value))
    return int(value)


def rows(value: Any) -> int:
    """shape[0] of a tensor (1 for a scalar), len() of a list."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return len(value)
    return int(shape[0]) if len(shape) else 1


def integers(value: Any) -> list[int]:
    """A list or a tensor as a list of plain integers."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    return [int(item) for item in listed]


def _special(batch: Any, snapshot: Snapshot, cp_rank: int) -> None:
    lengths = batch.seq_lens_cpu
    if lengths is None or isinstance(lengths, Unobserved):
        absent = None if lengths is None else Absent.NOT_OBSERVED
        snapshot["seq_lens_cpu.max"] = snapshot["seq_lens_cpu.sum"] = absent
    else:
        listed = lengths.tolist()
        snapshot["seq_lens_cpu.max"] = max(listed, default=0)
        snapshot["seq_lens_cpu.sum"] = sum(listed)
    snapshot["mrope_positions.rows"] = _token_axis(getattr(batch, "mrope_positions", _MISSING))
    children = getattr(batch, "tbo_children", _MISSING)
    snapshot["tbo_children"] = _value("rows", children)
    metadata = getattr(batch, "attn_cp_metadata", _MISSING)
    snapshot["attn_cp_metadata.rows"] = _shard_rows(metadata, cp_rank)


def _token_axis(value: Any) -> Value:
    if value is None or value is _MISSING or isinstance(value, Unobserved):
        return _value("rows", value)
    return int(value.shape[1])


def _shard_rows(metadata: Any, cp_rank: int) -> Value:
    """Tokens of this rank's shard, where the context-parallel metadata state them."""
    if metadata is None or metadata is _MISSING or isinstance(metadata, Unobserved):
        return _value("rows", metadata)
    per_rank = getattr(metadata, "per_rank_actual_token", None)
    if per_rank is None:
        return Absent.NOT_OBSERVED
    return integers(per_rank)[cp_rank]
