"""CPU stand-in for FlashMLA as sgl_kernel ships it: the kernel's shape checks, output of zeros.

The checks, their order and their words are those of FlashMLA's sparse decode (fp8 cache): shape of
`indices`, then of `num_splits`. They run before any arithmetic in the kernel too.
"""

from dataclasses import dataclass

import torch

# Streaming multiprocessors of an H200, and int32 words per scheduler entry in FlashMLA.
_SM_PARTS = 132
_SCHEDULE_WORDS = 8


@dataclass
class FlashMLASchedMeta:
    """Schedule of one decode call, in releases that pass it as one object."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty schedule: int32 [132, 8], and num_splits int32 [rows of cache_seqlens + 1]."""
    if cache_seqlens is None:
        raise RuntimeError("get_mla_metadata without cache_seqlens has no stand-in")
    return (
        torch.zeros(_SM_PARTS, _SCHEDULE_WORDS, dtype=torch.int32),
        torch.zeros(cache_seqlens.shape[0] + 1, dtype=torch.int32),
    )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | FlashMLASchedMeta | None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    **extra: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros [b, s_q, heads, head_dim_v] and their log-sum-exp [b, heads, s_q].

    q: [b, s_q, heads, dim]; indices: [b, s_q, topk]; num_splits: [b + 1]. Raises RuntimeError with
    the kernel's words when a shape does not fit.
    """
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        num_splits = tile_scheduler_metadata.num_splits
    rows, tokens, heads = q.shape[:3]
    if indices is not None and tuple(indices.shape) != (rows, tokens, indices.shape[-1]):
        raise RuntimeError("indices must have shape (b, s_q, topk)")
    if num_splits is None or tuple(num_splits.shape) != (rows + 1,):
        raise RuntimeError("num_splits must have shape (b+1)")
    output = torch.zeros(rows, tokens, heads, head_dim_v, dtype=q.dtype)
    return output, torch.zeros(rows, heads, tokens)


def flash_mla_sparse_fwd(*args: object, **options: object) -> None:
    """Sparse prefill: the lab's models are served with `flashmla_kv`, which does not call it."""
    raise RuntimeError("flash_mla_sparse_fwd has no stand-in in padtrace's lab")
