"""What every FlashMLA implementation offers here: plan, decode, availability.

The names and argument order are those of ``sgl_kernel.flash_mla`` (sglang-kernel 0.4.x), which
``sglang.kernels.ops.attention.flash_mla_interface`` of SGLang 0.5.23 keeps for sgl-flash-mla.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Availability:
    """Whether an implementation can be called here.

    Attributes:
        usable: True when a call may be made.
        reason: one line; why not, or what was found.
    """

    usable: bool
    reason: str


@dataclass(frozen=True)
class PlanRequest:
    """Arguments of ``get_mla_metadata``.

    Attributes:
        cache_seqlens: (b,), int32; tokens in the cache of each row.
        num_q_tokens_per_head_k: q tokens per row * num_heads_q // num_heads_k.
        num_heads_k: heads of the KV cache (1 for MLA).
        num_heads_q: heads of q; needed when ``topk`` is given.
        is_fp8_kvcache: whether the cache holds FP8.
        topk: tokens each q token attends to, or None for dense attention.
    """

    cache_seqlens: torch.Tensor
    num_q_tokens_per_head_k: int
    num_heads_k: int
    num_heads_q: int | None = None
    is_fp8_kvcache: bool = False
    topk: int | None = None


@dataclass(frozen=True)
class Plan:
    """The split-KV schedule of one batch.

    Attributes:
        tile_scheduler_metadata: (num_sm_parts, 8), int32.
        num_splits: (b + 1,), int32; starts at 0, row i owns the partial results
            ``num_splits[i] .. num_splits[i + 1] - 1``.
    """

    tile_scheduler_metadata: torch.Tensor
    num_splits: torch.Tensor


@dataclass(frozen=True)
class DecodeRequest:
    """Arguments of ``flash_mla_with_kvcache``.

    Attributes:
        q: (b, s_q, h_q, d_qk), bfloat16 (float16 or FP8 for dense calls).
        k_cache: (num_blocks, page_block_size, 1, bytes_per_token) for a sparse call,
            (num_blocks, 64, h_k, d_qk) for a dense one.
        block_table: (b, max_num_blocks_per_seq), int32; read by dense calls only.
        cache_seqlens: (b,), int32; read by dense calls only.
        head_dim_v: width of the value part, 512.
        tile_scheduler_metadata: (num_sm_parts, 8), int32, or None to let the call plan.
        num_splits: (b + 1,), int32, or None to let the call plan.
        softmax_scale: factor before the softmax; None means d_qk ** -0.5.
        causal: dense calls only.
        is_fp8_kvcache: whether the cache holds FP8.
        indices: (b, s_q, topk), int32, slots in the flattened cache, -1 for none; None = dense.
        attn_sink: (h_q,), float32.
        topk_length: (b,), int32; only that many leading indices count.
        extra_k_cache: a second cache of the same format (DeepSeek-V4).
        extra_indices_in_kvcache: (b, s_q, extra_topk), int32.
        extra_topk_length: (b,), int32.
        descale_q: (1,), float32; dense FP8 calls only.
        descale_k: (1,), float32; dense FP8 calls only.
        kv_format: layout name, for wheels that take one.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    head_dim_v: int
    tile_scheduler_metadata: torch.Tensor | None
    num_splits: torch.Tensor | None
    softmax_scale: float | None = None
    causal: bool = False
    is_fp8_kvcache: bool = False
    indices: torch.Tensor | None = None
    attn_sink: torch.Tensor | None = None
    topk_length: torch.Tensor | None = None
    extra_k_cache: torch.Tensor | None = None
    extra_indices_in_kvcache: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None
    descale_q: torch.Tensor | None = None
    descale_k: torch.Tensor | None = None
    kv_format: str | None = None


@dataclass(frozen=True)
class DecodeResult:
    """What a decode call gave.

    Attributes:
        out: (b, s_q, h_q, head_dim_v), dtype of q; None where the call was judged by its
            arguments only (a shape-only launch beyond the reference's budget).
        lse: (b, h_q, s_q), float32, natural logarithm; +inf for a row with nothing to attend to.
        plan: the schedule that was used; None where the implementation does not give it back.
        hazards: one line per thing the kernel does not check and that makes its result
            undefined (an index past the cache, a row that no part visits ...). Only the
            reference can see these; an empty tuple of a real kernel says nothing.
    """

    out: torch.Tensor | None
    lse: torch.Tensor | None
    plan: Plan | None
    hazards: tuple[str, ...] = ()


@runtime_checkable
class FlashMlaKernel(Protocol):
    """One implementation of the FlashMLA calls that SGLang makes."""

    @property
    def name(self) -> str:
        """Short name for reports, with the version where there is one."""
        ...

    @property
    def device(self) -> torch.device:
        """Where argument tensors must live."""
        ...

    def availability(self) -> Availability:
        """Whether calls can be made, and why not."""
        ...

    def get_mla_metadata(self, request: PlanRequest) -> Plan:
        """Plan the split of every row.

        Raises:
            RuntimeError, AssertionError: the kernel's own refusal, in its own words.
        """
        ...

    def flash_mla_with_kvcache(self, request: DecodeRequest) -> DecodeResult:
        """Run one decode call.

        Raises:
            RuntimeError, AssertionError: the kernel's own refusal, in its own words.
        """
        ...
