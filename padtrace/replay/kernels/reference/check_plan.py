"""Argument checks of the planning operators, in the order of the C++.

Source: ``csrc/python_api.cpp`` (``get_mla_decoding_metadata``) and
``csrc/extension/sm90/dense_fp8/dense_fp8_python_api.cpp``, sgl-project/FlashMLA branch ``sgl``.
"""

from __future__ import annotations

import torch

from padtrace.replay.kernels.interface import PlanRequest
from padtrace.replay.kernels.reference.words import Checks, require


def uses_dense_fp8(request: PlanRequest) -> bool:
    """FP8 without a top-k goes to an operator of its own."""
    return request.is_fp8_kvcache and request.topk is None


def check_plan(request: PlanRequest, checks: Checks) -> None:
    """Refuse what the planning operator refuses.

    Raises:
        KernelRefusedError: in the operator's words.
    """
    seqlens = request.cache_seqlens
    if uses_dense_fp8(request):
        checks.wordless(seqlens.is_contiguous(), "seqlens_k.is_contiguous()")
        checks.wordless(seqlens.dtype == torch.int32, "seqlens_k.dtype() == torch::kInt32")
        return
    require(seqlens.dtype == torch.int32, "seqlens_k must have dtype int32")
    require(seqlens.is_contiguous(), "seqlens_k must be contiguous")
    require(seqlens.dim() > 0 and seqlens.shape[0] > 0, "batch size must be positive")
    require(request.num_heads_k > 0, "num_heads_k must be positive")
    if request.topk is not None:
        require(
            request.num_heads_q is not None, "num_heads_q must be provided when topk is provided"
        )
        require(request.is_fp8_kvcache, "Sparse decoding requires is_fp8_kvcache=true")
    require(planned_heads(request) > 0, "num_heads_q must be positive")


def planned_heads(request: PlanRequest) -> int:
    """Heads of q as the operator takes them."""
    if request.num_heads_q is not None:
        return request.num_heads_q
    return request.num_heads_k * request.num_q_tokens_per_head_k


def planned_s_q(request: PlanRequest) -> int:
    """q tokens per row, which the operator derives from the head counts."""
    heads_ratio = max(1, planned_heads(request) // request.num_heads_k)
    return max(1, request.num_q_tokens_per_head_k // heads_ratio)
