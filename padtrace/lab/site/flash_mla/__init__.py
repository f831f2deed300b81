"""CPU stand-in for the `sgl-flash-mla` wheel, which newer releases call instead of sgl_kernel.

The calls differ, the kernel and its checks are the same: they live in `sgl_kernel.flash_mla`.
"""

import torch
from sgl_kernel.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
)
from sgl_kernel.flash_mla import get_mla_metadata as _schedule

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]


def get_mla_metadata() -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule object, which the wheel fills at the first decode call."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The schedule as tensors: int32 [132, 8], and num_splits int32 [rows + 1]."""
    return _schedule(
        cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk
    )
