"""The real kernels of the sgl-flash-mla wheel, through its ``flash_mla`` package.

The wheel holds two sets of operators. ``legacy`` (``use_legacy=True``) has SM90, dense decoding and
the V3.2 / V4 formats: what SGLang 0.5.23 calls for DSA. ``current`` knows the V4.1 formats on SM100
only. The schedule rides inside a ``FlashMLASchedMeta``; as SGLang's wrapper does
(``kernels/ops/attention/flash_mla_interface.py``), the tensors are put onto a fresh one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch

from padtrace.replay.kernels.cuda_state import cuda_reason
from padtrace.replay.kernels.interface import (
    Availability,
    DecodeRequest,
    DecodeResult,
    Plan,
    PlanRequest,
)
from padtrace.replay.kernels.sgl_kernel_adapter import first_line

_V32_NO_ROPE_BYTES = 528


class FlashMla:
    """``flash_mla`` of the installed sgl-flash-mla wheel.

    Args:
        use_legacy: which of the wheel's two operator sets to call.
    """

    def __init__(self, *, use_legacy: bool = True) -> None:
        self.use_legacy = use_legacy
        self._module: Any = None
        self._failure = ""

    @property
    def name(self) -> str:
        """Package, version and operator set."""
        side = "legacy" if self.use_legacy else "current"
        try:
            version = importlib.metadata.version("sgl-flash-mla")
        except importlib.metadata.PackageNotFoundError:
            return f"flash_mla ({side})"
        return f"flash_mla (sgl-flash-mla {version}, {side})"

    @property
    def device(self) -> torch.device:
        """The current CUDA device."""
        return torch.device("cuda")

    def availability(self) -> Availability:
        """Usable where CUDA works and the wheel holds this operator set for this card."""
        reason = cuda_reason()
        if reason:
            return Availability(False, reason)
        module = self._load()
        if module is None:
            return Availability(False, self._failure)
        if self.use_legacy and not getattr(module, "has_legacy", lambda: False)():
            return Availability(False, "this flash_mla holds no legacy operators")
        major = torch.cuda.get_device_capability()[0]
        if not self.use_legacy and major != 10:
            return Availability(False, "the current operators of flash_mla need SM100")
        return Availability(True, f"{self.name} on {torch.cuda.get_device_name()}")

    def get_mla_metadata(self, request: PlanRequest) -> Plan:
        """``flash_mla.get_mla_decoding_metadata``."""
        metadata, num_splits = self._required().get_mla_decoding_metadata(
            request.cache_seqlens,
            request.num_q_tokens_per_head_k,
            request.num_heads_k,
            request.num_heads_q,
            request.is_fp8_kvcache,
            request.topk,
            use_legacy=self.use_legacy,
        )
        return Plan(metadata, num_splits)

    def flash_mla_with_kvcache(self, request: DecodeRequest) -> DecodeResult:
        """``flash_mla.flash_mla_with_kvcache``, the schedule inside a fresh scheduler object."""
        module = self._required()
        scheduler = module.flash_mla_interface.FlashMLASchedMeta(
            tile_scheduler_metadata=request.tile_scheduler_metadata, num_splits=request.num_splits
        )
        out, lse = module.flash_mla_with_kvcache(
            q=request.q,
            k_cache=request.k_cache,
            block_table=request.block_table,
            cache_seqlens=request.cache_seqlens,
            head_dim_v=request.head_dim_v,
            tile_scheduler_metadata=scheduler,
            softmax_scale=request.softmax_scale,
            causal=request.causal,
            is_fp8_kvcache=self._is_fp8(request),
            indices=request.indices,
            attn_sink=request.attn_sink,
            extra_k_cache=request.extra_k_cache,
            extra_indices_in_kvcache=request.extra_indices_in_kvcache,
            topk_length=request.topk_length,
            extra_topk_length=request.extra_topk_length,
            use_legacy=self.use_legacy,
            kv_format=self._kv_format(request),
            descale_q=request.descale_q,
            descale_k=request.descale_k,
        )
        plan = None
        if scheduler.num_splits is not None and scheduler.tile_scheduler_metadata is not None:
            plan = Plan(scheduler.tile_scheduler_metadata, scheduler.num_splits)
        return DecodeResult(out, lse, plan)

    def _is_fp8(self, request: DecodeRequest) -> bool:
        if request.indices is None:
            return request.q.element_size() == 1
        return request.is_fp8_kvcache

    def _kv_format(self, request: DecodeRequest) -> str | None:
        """528 bytes per token mean V3.2 without RoPE where the schedule came as tensors."""
        no_rope = (
            request.kv_format is None
            and self.use_legacy
            and request.indices is not None
            and request.tile_scheduler_metadata is not None
            and request.q.shape[-1] == 512
            and request.k_cache.shape[-1] == _V32_NO_ROPE_BYTES
        )
        return "V32_NO_ROPE" if no_rope else request.kv_format

    def _load(self) -> Any:
        if self._module is None and not self._failure:
            try:
                self._module = importlib.import_module("flash_mla")
                importlib.import_module("flash_mla.flash_mla_interface")
            except ModuleNotFoundError as missing:
                self._module = None
                self._failure = f"sgl-flash-mla is not installed ({first_line(missing)})"
            except Exception as failed:
                self._module = None
                self._failure = f"flash_mla does not load: {first_line(failed)}"
        return self._module

    def _required(self) -> Any:
        module = self._load()
        if module is None:
            raise RuntimeError(self._failure)
        return module
