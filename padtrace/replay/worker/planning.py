"""Plans attention metadata with the release's real DSA backend, on a CPU.

Replaced are device queries and kernels alone: the scheduler metadata of FlashMLA has the shape of
its contract, and the kernel that expands lengths runs in Triton's interpreter on tensors that say
they are on a GPU, since it asserts that.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from padtrace.recording.absent import Absent
from padtrace.recording.facts import Facts, WorkerFacts
from padtrace.recording.model import Value
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.model_config import strict_model_config
from padtrace.replay.worker.obstacles import hollow_module, import_or_none
from padtrace.replay.worker.provenance import Provenance
from padtrace.replay.worker.snapshots import rows
from padtrace.replay.worker.standins import StandIn

_SM_PARTS = 132
_METADATA_INTEGERS = 8

_FIELD_ROWS = (
    "page_table_1",
    "real_page_table",
    "cache_seqlens_int32",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "dsa_cache_seqlens_int32",
    "dsa_cu_seqlens_q",
    "dsa_cu_seqlens_k",
    "dsa_seqlens_expanded",
    "dsa_extend_seq_lens_list",
    "token_to_batch_idx",
    "indexer_seq_lens",
    "topk_indices_offset",
    "paged_mqa_ctx_lens_2d",
)
_INTEGERS = ("max_seq_len_q", "max_seq_len_k", "seq_lens_sum")
_CONTEXT_LENS_MODES = ("DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")


class PretendsCuda(torch.Tensor):
    """A CPU tensor whose `is_cuda` is True."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


# Kernel packages and modules that only a GPU machine can import, by what they need.
_GPU_MODULES = (
    ("cutlass", "sglang.jit_kernel.dsa.cutedsl_paged_mqa_logits"),
    ("flash_mla", "flash_mla"),
    ("flash_mla", "flash_mla.flash_mla_interface"),
)


def prepare_modules() -> None:
    """Stand in for kernel modules that the DSA backend imports and this machine cannot."""
    missing = {needed for needed, _ in _GPU_MODULES if importlib.util.find_spec(needed) is None}
    for needed, name in _GPU_MODULES:
        if needed in missing:
            hollow_module(name)


def install_kernels(capabilities: Capabilities, provenance: Provenance) -> None:
    """Replace the two kernels that planning launches, and watch the metadata call."""
    interface = import_or_none("sglang.kernels.ops.attention.flash_mla_interface")
    if interface is not None and hasattr(interface, "get_mla_metadata"):
        interface.get_mla_metadata = _metadata_of_contract  # type: ignore[attr-defined]
    else:
        package = sys.modules.get("sgl_kernel") or hollow_module("sgl_kernel")
        module = ModuleType("sgl_kernel.flash_mla")
        module.get_mla_metadata = _metadata_of_contract  # type: ignore[attr-defined]
        sys.modules["sgl_kernel.flash_mla"] = module
        package.flash_mla = module  # type: ignore[attr-defined]
    backend_module = capabilities.dsa_module
    if hasattr(backend_module, "seqlens_expand_triton"):
        expand = interpreted(backend_module.seqlens_expand_triton)
        backend_module.seqlens_expand_triton = expand  # type: ignore[attr-defined]
    _watch_metadata(capabilities.dsa_class, provenance)


def _metadata_of_contract(cache_seqlens: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Shapes as the kernel documents them: (SM parts, 8) and (rows + 1,)."""
    schedule = torch.zeros((_SM_PARTS, _METADATA_INTEGERS), dtype=torch.int32)
    return schedule, torch.zeros(cache_seqlens.shape[0] + 1, dtype=torch.int32)


def interpreted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run the real kernel; equal arguments once, since interpreting takes milliseconds."""
    seen: dict[tuple[Any, ...], Any] = {}

    def seqlens_expand_triton(
        extend_seq_lens: Any, seq_lens: Any, total_len: int, max_q_len: int
    ) -> Any:
        key = (tuple(extend_seq_lens.tolist()), tuple(seq_lens.tolist()), total_len, max_q_len)
        if key not in seen:
            if len(seen) > 4096:
                seen.clear()
            expanded = original(
                extend_seq_lens.as_subclass(PretendsCuda),
                seq_lens.as_subclass(PretendsCuda),
                total_len,
                max_q_len,
            )
            seen[key] = expanded.as_subclass(torch.Tensor)
        return seen[key].clone()

    return seqlens_expand_triton


def _watch_metadata(backend_class: Any, provenance: Provenance) -> None:
    original = backend_class._compute_flashmla_metadata

    def _compute_flashmla_metadata(backend: Any, cache_seqlens: Any, seq_len_q: int) -> Any:
        made = original(backend, cache_seqlens=cache_seqlens, seq_len_q=seq_len_q)
        provenance.planned.append((rows(cache_seqlens), rows(made.num_splits)))
        return made

    backend_class._compute_flashmla_metadata = _compute_flashmla_metadata


class Planner:
    """The DSA backends of one process, made by their real constructors when first needed."""

    def __init__(
        self, capabilities: Capabilities, facts: Facts, server_args: Any, provenance: Provenance
    ) -> None:
        self._capabilities = capabilities
        self._facts = facts
        self._server_args = server_args
        self._provenance = provenance
        self._backends: dict[tuple[str, int], Any] = {}
        self._pools: dict[str, dict[str, StandIn]] = {}

    def backend(self, worker: str, backend_id: int) -> Any:
        key = (worker, backend_id)
        if key not in self._backends:
            runner = self._model_runner(worker)
            self._backends[key] = self._capabilities.dsa_class(runner)
        return self._backends[key]

    def plan(
        self, batch: Any, worker: str, backend_id: int, context_lens: bool = True
    ) -> dict[str, Value]:
        """Run `init_forward_metadata` and read what it made.

        Args:
            context_lens: also build the DeepGEMM context lengths that the backend makes on CUDA.
        """
        backend = self.backend(worker, backend_id)
        for name in ("req_to_token_pool", "token_to_kv_pool"):
            # Where a batch carries the pools, the backend reads them there.
            if hasattr(batch, name):
                setattr(batch, name, getattr(backend, name, None) or self._pools[worker][name])
        backend.init_forward_metadata(batch)
        return self._read(backend, batch, context_lens)

    def pad_lengths(self, batch: Any, shard: Callable[[Any, Any], Any]) -> dict[str, Value]:
        """Run the function that pads the plan's lengths, alone, on as many rows as the mode has."""
        lengths = torch.zeros(_unpadded_rows(batch), dtype=torch.int32)
        lengths = shard(batch, lengths)
        utils = self._capabilities.dsa_utils
        padded = getattr(utils, self._capabilities.pad_lengths)(batch, lengths)
        count = rows(padded)
        self._provenance.planned.append((count, count + 1))
        return {
            "planned.rows": count,
            "num_splits.rows": count + 1,
            "dsa_cache_seqlens_int32.rows": count,
            "dsa_seqlens_expanded.rows": rows(lengths),
        }

    def head_shape(self, worker: str) -> list[int]:
        """[1, heads, elements] of the q that reaches the FlashMLA call."""
        backend = self._backends.get((worker, 0)) or next(iter(self._backends.values()), None)
        heads = getattr(backend, "flashmla_kv_num_q_heads", None)
        if backend is None or heads is None:
            return []
        return [1, int(heads), int(backend.kv_lora_rank + backend.qk_rope_head_dim)]

    def _model_runner(self, worker: str) -> StandIn:
        facts = self._facts.workers.get(worker) or self._facts.workers.get("target")
        facts = facts or WorkerFacts()
        dtype = _dtype(facts.kv_cache_dtype)
        store_fp8 = dtype == torch.float8_e4m3fn
        config = strict_model_config(facts)
        columns = facts.req_to_token_shape[1] if facts.req_to_token_shape else 0
        table = torch.zeros((1, max(columns, config.context_len + 1024)), dtype=torch.int32)
        pool = {
            "kv_cache_dim": facts.kv_cache_dim or 656,
            "dsa_kv_cache_store_fp8": store_fp8,
            "nsa_kv_cache_store_fp8": store_fp8,
            "dtype": dtype,
            "page_size": facts.page_size or 64,
            "size": 1 << 30,
        }
        self._pools[worker] = {
            "token_to_kv_pool": StandIn("token_to_kv_pool", pool, absent=("kv_shard",)),
            "req_to_token_pool": StandIn(
                "req_to_token_pool", {"req_to_token": table, "size": 1 << 16}
            ),
        }
        return StandIn(
            "model_runner",
            {
                **self._pools[worker],
                "device": "cpu",
                "page_size": facts.page_size or 64,
                "kv_cache_dtype": dtype,
                "model_config": config,
                "server_args": self._server_args,
                "is_draft_worker": worker == "draft",
                "hisparse_coordinator": None,
            },
        )

    def _read(self, backend: Any, batch: Any, context_lens: bool) -> dict[str, Value]:
        metadata = backend.forward_metadata
        values: dict[str, Value] = {}
        for name in _FIELD_ROWS:
            values[f"{name}.rows"] = _rows_or_absent(_field(metadata, name))
        for name in ("page_table_1", "real_page_table"):
            table = _field(metadata, name)
            width = _rows_or_absent(table)
            values[f"{name}.width"] = int(table.shape[1]) if isinstance(width, int) else width
        for name in _INTEGERS:
            value = _field(metadata, name)
            values[name] = value if value is None or isinstance(value, Absent) else int(value)
        if context_lens and values["paged_mqa_ctx_lens_2d.rows"] is None:
            values["paged_mqa_ctx_lens_2d.rows"] = self._context_lens(backend, batch, metadata)
        planned = self._provenance.planned[-1] if self._provenance.planned else (None, None)
        values["planned.rows"], values["num_splits.rows"] = planned
        return values

    def _context_lens(self, backend: Any, batch: Any, metadata: Any) -> Value:
        """The DeepGEMM context lengths that the backend builds only where CUDA is."""
        build = getattr(backend, "_build_paged_mqa_schedule_2d_ctx_lens", None)
        if batch.forward_mode.name not in _CONTEXT_LENS_MODES:
            return None
        if build is None:
            return Absent.NO_ATTRIBUTE
        available: dict[str, Any] = {
            "forward_mode": batch.forward_mode,
            "cache_seqlens_int32": metadata.cache_seqlens_int32,
            "seqlens_expanded": _field(metadata, "dsa_seqlens_expanded"),
            "batch_size": batch.batch_size,
        }
        wanted = inspect.signature(build).parameters
        return rows(build(**{name: available[name] for name in wanted if name in available}))


def _unpadded_rows(batch: Any) -> int:
    """Rows of the plan before its own padding, by mode, as the DSA backend forms them."""
    mode = batch.forward_mode
    if mode.is_decode_or_idle():
        return rows(batch.seq_lens)
    if mode.is_target_verify():
        return int(batch.batch_size * batch.spec_info.num_tokens_per_req)
    return sum(int(length) for length in batch.extend_seq_lens_cpu)


def _field(metadata: Any, name: str) -> Any:
    for candidate in (name, name.replace("dsa_", "nsa_", 1)):
        if hasattr(metadata, candidate):
            return getattr(metadata, candidate)
    return Absent.NO_ATTRIBUTE


def _rows_or_absent(value: Any) -> Value:
    return value if value is None or isinstance(value, Absent) else rows(value)


def _dtype(name: str | None) -> Any:
    return getattr(torch, (name or "torch.float8_e4m3fn").removeprefix("torch."))
