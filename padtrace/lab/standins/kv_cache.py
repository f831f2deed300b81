"""Kernels that write the MLA KV cache."""

from typing import Any

import torch

from padtrace.lab.standins.fp8 import quantize_blocks
from padtrace.lab.standins.targets import first_present, replace


def install() -> None:
    """Stand in for the Triton writers; the interpreter rejects the dtype of their mask."""
    pool = first_present("sglang.srt.mem_cache.memory_pool")
    replace(pool, "set_mla_kv_buffer_triton", set_mla_kv_buffer)
    if hasattr(pool, "set_mla_kv_buffer_dcp_sharded_triton"):  # newer releases route through it
        replace(pool, "set_mla_kv_buffer_dcp_sharded_triton", set_mla_kv_buffer)
    # For speed only: the Triton original also runs interpreted.
    replace(pool, "quantize_k_cache_separate", quantize_k_cache_separate)


def set_mla_kv_buffer(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    cache_k_nope: torch.Tensor,
    cache_k_rope: torch.Tensor,
    *sharding: Any,
    **sharding_options: Any,
) -> None:
    """Write one row of `[nope | rope]` per location, as `set_mla_kv_buffer_triton` does.

    kv_buffer: [slots, ..., width]; loc: [n] slots; both parts: at least n rows. Raises ValueError
    with fewer rows than locations: the kernel would read past the end. Sharding arguments of the
    decode-context-parallel variant are ignored, the lab runs without it.
    """
    rows = loc.numel()
    parts = [part.reshape(part.shape[0], -1)[:rows] for part in (cache_k_nope, cache_k_rope)]
    if any(part.shape[0] != rows for part in parts):
        found = [part.shape[0] for part in parts]
        raise ValueError(f"set_mla_kv_buffer: {rows} locations but {found} rows of nope and rope")
    row = torch.cat(parts, dim=-1)
    kv_buffer.view(kv_buffer.shape[0], -1)[loc.long(), : row.shape[1]] = row


def quantize_k_cache_separate(
    k_nope: torch.Tensor, k_rope: torch.Tensor, tile_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the fp8 nope part with its float32 scales, and of the untouched rope part.

    Returns two uint8 tensors [n, 1, bytes], laid out as `quantize_k_cache_separate` of SGLang.
    """
    rows = k_nope.shape[0]
    quantized, scales = quantize_blocks(k_nope.reshape(rows, -1), tile_size)
    scale_bytes = scales.contiguous().view(torch.uint8).reshape(rows, -1)
    nope_bytes = torch.cat([quantized.view(torch.uint8), scale_bytes], dim=-1)
    rope_bytes = k_rope.reshape(rows, -1).contiguous().view(torch.uint8)
    return nope_bytes.unsqueeze(1), rope_bytes.unsqueeze(1)
