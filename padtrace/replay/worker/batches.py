"""Rebuilds a ForwardBatch from a snapshot, and applies what code outside the hooks did to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from padtrace.recording import schema
from padtrace.recording.absent import Absent
from padtrace.recording.model import Snapshot, Value
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.events import RecordedEvent
from padtrace.replay.worker.snapshots import ALIASES
from padtrace.replay.worker.standins import Unobserved
from padtrace.replay.worker.strict_batch import strict

_INT64 = torch.int64
_INT32 = torch.int32

_Make = Callable[[int], Any]


def _zeros(dtype: torch.dtype, *shape: int) -> _Make:
    return lambda count: torch.zeros(count, *shape, dtype=dtype)


# Tensor fields: what makes one of a row count. The contents do not matter to a row count, except
# for lengths, which `_lengths` rebuilds.
_TENSORS: dict[str, _Make] = {
    "input_ids": _zeros(_INT64),
    "positions": _zeros(_INT64),
    "out_cache_loc": _zeros(_INT64),
    "req_pool_indices": _zeros(_INT64),
    "orig_seq_lens": _zeros(_INT32),
    "extend_start_loc": _zeros(_INT32),
    "input_embeds": _zeros(torch.float32, 1),
    "encoder_lens": _zeros(_INT64),
    "mamba_track_indices": _zeros(_INT64),
    "mamba_track_mask": _zeros(torch.bool),
    "mamba_track_seqlens": _zeros(_INT64),
    "mrope_positions": lambda count: torch.zeros((3, count), dtype=_INT64),
}
_SPEC_TENSORS: dict[str, _Make] = {
    "topk_p": _zeros(torch.float32, 1),
    "topk_index": _zeros(_INT64, 1),
    "hidden_states": _zeros(torch.float32, 1),
    "draft_probs": _zeros(torch.float32, 1),
    "num_correct_drafts": _zeros(_INT32),
    "num_accept_tokens": _zeros(_INT32),
    "positions": _zeros(_INT64),
}
_SPEC_COLUMNS = [(name, f"spec_info.{name}.rows", make) for name, make in _SPEC_TENSORS.items()]
_SPEC_INTEGERS = ("num_tokens_per_req", "num_tokens_for_logprob_per_req", "draft_token_num")
_LISTS = ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu")
_COUNTS = (
    "global_num_tokens_cpu",
    "original_global_num_tokens_cpu",
    "global_num_tokens_for_logprob_cpu",
)
_SCALARS = (
    "batch_size",
    "seq_lens_sum",
    "extend_num_tokens",
    "num_token_non_padded_cpu",
    "global_dp_buffer_len",
    "original_batch_size",
    "original_num_tokens",
    "forward_metadata_planned_bs",
    "forward_metadata_planned_num_tokens",
    "tbo_split_seq_index",
    "tbo_padded_len",
)
_FLAGS = (
    "is_extend_in_batch",
    "dp_spec_prefill_coordination_applied",
    "can_run_dp_cuda_graph",
    "can_run_dp_breakable_cuda_graph",
    "forward_metadata_ready",
    "forward_metadata_replan_equivalent",
)

# Given to the constructor; the others are set after it.
_CONSTRUCTED = frozenset(
    {"forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc"}
    | {"seq_lens_sum"}
)

# Given by the driver, or kept by SGLang's own pad.
_DRIVERS = frozenset(
    {"spec_info", "seq_lens_cpu", "capture_hidden_mode", "req_to_token_pool", "token_to_kv_pool"}
    | {"attn_backend", "global_num_tokens_for_logprob_gpu", "return_logprob"}
)

# What SGLang fills in itself; not observed there means that it has not happened yet.
_RESULTS = frozenset(
    {
        *_COUNTS,
        *("global_dp_buffer_len", "original_batch_size", "original_num_tokens"),
        *("forward_metadata_planned_bs", "forward_metadata_planned_num_tokens"),
        *("forward_metadata_ready", "forward_metadata_replan_equivalent", "tbo_padded_len"),
        "dp_spec_prefill_coordination_applied",
    }
)


_Setter = Callable[[Any, str, Snapshot], None]


class BatchBuilder:
    """Makes real ForwardBatch objects of one release."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._modes = capabilities.forward_mode
        # Column to field and setter; a field of several columns is set by the first in a build.
        self._setters: dict[str, tuple[str, _Setter]] = {}
        for column in schema.SNAPSHOT.names():
            name = column.removesuffix(".rows")
            name = "seq_lens_cpu" if name.startswith("seq_lens_cpu.") else name
            setter = self._setter(name)
            if setter is not None:
                self._setters[column] = (name, setter)
        self._when_built = [
            (column, name, setter)
            for column, (name, setter) in self._setters.items()
            if name not in _CONSTRUCTED and name != "seq_lens_cpu"
        ]
        self._values = itemgetter(*(column for column, _, _ in self._when_built))
        names = {name for name, _ in self._setters.values()} | _CONSTRUCTED | _DRIVERS
        names |= {alias for name in names for alias in ALIASES.get(name, ())}
        self._class = strict(capabilities.batch_class, frozenset(names))

    def build(self, snapshot: Snapshot) -> Any:
        """The batch that a snapshot describes.

        Raises:
            NotHeldError: later, when SGLang touches a field that was not observed.
        """
        seq_lens = _lengths(snapshot)
        batch = self._class(
            forward_mode=self.mode(snapshot["forward_mode"]),
            batch_size=_plain(snapshot, "batch_size"),
            input_ids=_tensor_field(snapshot, "input_ids"),
            req_pool_indices=_tensor_field(snapshot, "req_pool_indices"),
            seq_lens=_on_device(snapshot, seq_lens),
            out_cache_loc=_tensor_field(snapshot, "out_cache_loc"),
            seq_lens_sum=_plain(snapshot, "seq_lens_sum"),
        )
        if not _nothing_to_set(snapshot["seq_lens_cpu.rows"], "seq_lens_cpu"):
            batch.seq_lens_cpu = _mirror(snapshot, seq_lens)
        for value, (_, name, setter) in zip(self._values(snapshot), self._when_built, strict=True):
            # A fresh batch holds None already, and results that SGLang has yet to make.
            if value is not None and not _nothing_to_set(value, name):
                setter(batch, name, snapshot)
        batch.spec_info = self.spec_info(snapshot)
        return batch

    def mode(self, name: Value) -> Any:
        if isinstance(name, str) and hasattr(self._modes, name):
            return self._modes[name]
        raise self._capabilities.missing(f"forward mode {name}", f"ForwardMode.{name}")

    def lengths(self, snapshot: Snapshot) -> list[int]:
        """Sequence lengths, one per request, that agree with the snapshot."""
        return _lengths(snapshot)

    def set_field(self, batch: Any, column: str, snapshot: Snapshot) -> None:
        """Give `batch` what `snapshot` says of one column that is not of the speculative input."""
        if column in self._setters:
            name, setter = self._setters[column]
            if not _nothing_to_set(snapshot[column], name):
                setter(batch, name, snapshot)

    def _setter(self, name: str) -> _Setter | None:
        if name in _TENSORS:
            return _set_tensor
        if name in _LISTS or name in _COUNTS:
            return _set_list
        if name in _SCALARS or name in _FLAGS:
            return self._set_scalar
        return {
            "seq_lens": _set_seq_lens,
            "seq_lens_cpu": _set_seq_lens,
            "extend_seq_lens": _set_extend,
            "extend_prefix_lens": _set_extend,
            "lora_ids": _set_lora,
            "attn_cp_metadata": _forget_shard,
            "global_num_tokens_gpu": _set_device_counts,
            "forward_mode": self._set_mode,
            "original_forward_mode": self._set_mode,
            "dp_padding_mode": self._set_padding_mode,
        }.get(name)

    def _set_scalar(self, batch: Any, name: str, snapshot: Snapshot) -> None:
        convert: Callable[[Any], Any] = bool if name in _FLAGS else int
        value = _observed(snapshot, name, convert)
        for attribute in (name, *ALIASES.get(name, ())):
            if hasattr(batch, attribute):
                setattr(batch, attribute, value)

    def _set_mode(self, batch: Any, name: str, snapshot: Snapshot) -> None:
        value = snapshot[name]
        attribute = "_original_forward_mode" if name == "original_forward_mode" else name
        if value is None:
            if hasattr(batch, attribute):
                setattr(batch, attribute, None)
        elif isinstance(value, str):
            setattr(batch, attribute, self.mode(value))

    def _set_padding_mode(self, batch: Any, name: str, snapshot: Snapshot) -> None:
        value = snapshot[name]
        if isinstance(value, str):
            batch.dp_padding_mode = self._capabilities.padding_mode[value]
        elif value is None:
            batch.dp_padding_mode = None

    def spec_info(self, snapshot: Snapshot) -> Any:
        """The speculative input: the release's own class where it can be made, else a stand-in."""
        name = snapshot.get("spec_info")
        if name is None or name is Absent.NO_ATTRIBUTE:
            return None
        if not isinstance(name, str):
            return Unobserved("forward_batch.spec_info")
        kind = self._capabilities.spec_class(name)
        if kind is None:
            raise self._capabilities.missing(f"speculative input {name}", f"a class {name}")
        made = _bare(kind, snapshot)
        for field, column, make in _SPEC_COLUMNS:
            if not hasattr(made, field):
                continue
            value = snapshot.get(column, Absent.NOT_OBSERVED)
            if value is None:
                setattr(made, field, None)
            elif isinstance(value, int):
                setattr(made, field, make(value))
        return made


def schedule_values(sync: RecordedEvent | None, snapshot: Snapshot) -> dict[str, Any]:
    """The counts that the scheduler hands to the function that fills them in, if it syncs."""
    if sync is None:
        names = (*_SCHEDULED_COUNTS, "lora_ids", "spec_info")
        return {**dict.fromkeys(names), **dict.fromkeys(_SCHEDULED_VOTES, False)}
    vote = sync.integer("can_run_dp_cuda_graph") == 1
    draft, logprob = (
        sync.vector(name) for name in ("draft_counts_before", "draft_logprob_counts_before")
    )
    lora = snapshot.get("lora_ids.rows")
    return {
        "global_num_tokens": sync.vector("counts_before"),
        "global_num_tokens_for_logprob": sync.vector("logprob_counts_before"),
        "draft_global_num_tokens": draft,
        # Older recordings and made ones do not state it.
        "draft_global_num_tokens_for_logprob": (
            logprob if logprob is not None or draft is None else list(draft)
        ),
        **dict.fromkeys(_SCHEDULED_VOTES, vote),
        "dp_spec_prefill_coordination_applied": (
            snapshot.get("dp_spec_prefill_coordination_applied") == 1
        ),
        "lora_ids": [None] * lora if isinstance(lora, int) else None,
        "spec_info": None,
    }


_SCHEDULED_COUNTS = (
    *("global_num_tokens", "global_num_tokens_for_logprob"),
    *("draft_global_num_tokens", "draft_global_num_tokens_for_logprob"),
)
_SCHEDULED_VOTES = (
    *("dp_spec_prefill_coordination_applied", "can_run_dp_cuda_graph"),
    *("can_run_decode_cuda_graph", "can_run_dp_draft_cuda_graph"),
)
# What of the scheduler's batch only some releases have.
SCHEDULED = (*_SCHEDULED_COUNTS, *_SCHEDULED_VOTES)


def _nothing_to_set(value: Value, name: str) -> bool:
    """No such attribute in the recorded release, or a result that was not there yet."""
    if value.__class__ is not Absent:
        return False
    return value is Absent.NO_ATTRIBUTE or (value is Absent.NOT_OBSERVED and name in _RESULTS)


def _set_tensor(batch: Any, name: str, snapshot: Snapshot) -> None:
    setattr(batch, name, _tensor_field(snapshot, name))


def _set_list(batch: Any, name: str, snapshot: Snapshot) -> None:
    setattr(batch, name, _observed(snapshot, name, list))


def _bare(kind: Any, snapshot: Snapshot) -> Any:
    """An instance with the widths that were recorded, made by the class's own `__init__`."""
    integers = {
        name: snapshot[f"spec_info.{name}"]
        for name in _SPEC_INTEGERS
        if isinstance(snapshot.get(f"spec_info.{name}"), int)
    }
    if kind not in _FIELDS:
        _FIELDS[kind] = _fields(kind)
    fields, required = _FIELDS[kind]
    given = dict.fromkeys(required)
    given.update({name: value for name, value in integers.items() if name in fields})
    made = kind(**given)
    for name, value in integers.items():
        # Some releases derive one width from the other when the object is made.
        if name in fields:
            setattr(made, name, value)
    return made


# Of a class of speculative input: all its fields, and those that its constructor must be given.
_FIELDS: dict[Any, tuple[frozenset[str], tuple[str, ...]]] = {}


def _fields(kind: Any) -> tuple[frozenset[str], tuple[str, ...]]:
    fields = getattr(kind, "__dataclass_fields__", {})
    missing = dataclasses.MISSING
    required = [
        name
        for name, field in fields.items()
        if field.init and field.default is missing and field.default_factory is missing
    ]
    return frozenset(fields), tuple(required)


def _tensor_field(snapshot: Snapshot, name: str) -> Any:
    return _optional(snapshot, f"{name}.rows", _TENSORS[name])


def _optional(snapshot: Snapshot, column: str, make: _Make) -> Any:
    value = snapshot.get(column, Absent.NOT_OBSERVED)
    if value.__class__ is int:
        return make(value)
    if value is None:
        return None
    return Unobserved(f"forward_batch.{column.removesuffix('.rows')}")


def _plain(snapshot: Snapshot, name: str) -> Any:
    return _observed(snapshot, name, int)


def _observed(snapshot: Snapshot, name: str, convert: Callable[[Any], Any]) -> Any:
    value = snapshot.get(name, Absent.NOT_OBSERVED)
    if value is None:
        return None
    if isinstance(value, Absent):
        return Unobserved(f"forward_batch.{name}")
    return convert(value)


def _lengths(snapshot: Snapshot) -> list[int]:
    """Sequence lengths that agree with every recorded row count, maximum and sum.

    Which request has which length is not recorded; no row count depends on it.
    """
    count = snapshot.get("seq_lens.rows")
    mirror = snapshot.get("seq_lens_cpu.rows")
    count = mirror if isinstance(mirror, int) else count
    if not isinstance(count, int):
        return []
    total, longest = snapshot.get("seq_lens_cpu.sum"), snapshot.get("seq_lens_cpu.max")
    extend = snapshot.get("extend_seq_lens_cpu")
    prefix = snapshot.get("extend_prefix_lens_cpu")
    if isinstance(extend, list) and isinstance(prefix, list) and len(extend) == len(prefix):
        pairs: Any = zip(prefix, extend, strict=True)
        summed = [int(old) + int(new) for old, new in pairs]
        if len(summed) == count and total in (sum(summed), None):
            return summed
    if not isinstance(total, int) or not isinstance(longest, int):
        total = snapshot.get("seq_lens_sum")
        if not isinstance(total, int):
            return [1] * count
        longest = max(total - count + 1, 1)
    return spread(count, total, longest)


def spread(count: int, total: int, longest: int) -> list[int]:
    """`count` integers that sum to `total`, the first and largest being `longest`."""
    if count <= 0:
        return []
    rest, others = total - longest, count - 1
    if others == 0:
        return [longest]
    low, extra = divmod(rest, others)
    return [longest] + [low + (index < extra) for index in range(others)]


def _fit(values: Sequence[int], count: int) -> Any:
    listed = values if len(values) == count else [*values[:count]] + [1] * (count - len(values))
    return torch.from_numpy(np.array(listed, dtype=np.int64))


def _on_device(snapshot: Snapshot, values: list[int]) -> Any:
    return _optional(snapshot, "seq_lens.rows", lambda count: _fit(values, count))


def _mirror(snapshot: Snapshot, values: list[int]) -> Any:
    return _optional(snapshot, "seq_lens_cpu.rows", lambda count: _fit(values, count))


def _set_seq_lens(batch: Any, name: str, snapshot: Snapshot) -> None:
    values = _lengths(snapshot)
    batch.seq_lens, batch.seq_lens_cpu = _on_device(snapshot, values), _mirror(snapshot, values)


def _set_extend(batch: Any, name: str, snapshot: Snapshot) -> None:
    values = snapshot.get(f"{name}_cpu")
    known = [int(value) for value in values] if isinstance(values, list) else []

    def make(count: int) -> Any:
        listed = known[:count] + [0] * max(count - len(known), 0)
        return torch.from_numpy(np.array(listed, dtype=np.int32))

    setattr(batch, name, _optional(snapshot, f"{name}.rows", make))


def _set_lora(batch: Any, name: str, snapshot: Snapshot) -> None:
    batch.lora_ids = _optional(snapshot, "lora_ids.rows", lambda count: [None] * count)


def _forget_shard(batch: Any, name: str, snapshot: Snapshot) -> None:
    """A runner shards a copy of the batch; only SGLang can make what the copy then holds."""
    if snapshot["attn_cp_metadata.rows"] is None and hasattr(batch, name):
        batch.attn_cp_metadata = None


def _set_device_counts(batch: Any, name: str, snapshot: Snapshot) -> None:
    value = snapshot.get("global_num_tokens_gpu.rows")
    if isinstance(value, int):
        batch.global_num_tokens_gpu = torch.zeros(value, dtype=_INT64)
        counts = batch.global_num_tokens_for_logprob_cpu
        if isinstance(counts, list):
            batch.global_num_tokens_for_logprob_gpu = torch.tensor(counts, dtype=_INT64)
    elif value is None:
        batch.global_num_tokens_gpu = None
