"""Argument checks of the dense decodes, in the order of the C++.

Source: ``csrc/api/dense_decode.h`` (``dense_attn_decode_interface``), ``csrc/python_api.cpp`` and
``csrc/extension/sm90/dense_fp8/dense_fp8_python_api.cpp`` (``fwd_kvcache_mla_fp8``),
sgl-project/FlashMLA branches ``sgl`` and ``rebase``.
"""

from __future__ import annotations

import torch

from padtrace.replay.kernels.generations import SGL_KERNEL_04_2
from padtrace.replay.kernels.interface import DecodeRequest
from padtrace.replay.kernels.reference.gpu import GpuModel
from padtrace.replay.kernels.reference.schedule import METADATA_WIDTH, dense_sm_parts
from padtrace.replay.kernels.reference.words import Checks, KernelExitsError, require


def is_dense_fp8(request: DecodeRequest) -> bool:
    """Dense calls go to the FP8 operator when q itself is one byte wide."""
    return request.q.element_size() == 1


def check_dense_wrapper(request: DecodeRequest, checks: Checks) -> None:
    """The asserts of the Python wrapper and of ``fwd_kvcache_mla``."""
    assert (request.descale_q is None) == (request.descale_k is None), (
        "descale_q and descale_k should be both None or both not None"
    )
    if is_dense_fp8(request) or checks.generation.stable_abi:
        return
    require(
        not request.is_fp8_kvcache,
        "Dense FP8 decode is exposed via fwd_kvcache_mla_fp8, not fwd_kvcache_mla",
    )
    if checks.generation is SGL_KERNEL_04_2:
        return
    for name in (
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
    ):
        require(getattr(request, name) is None, f"{name} is only supported for sparse decode")


def _check_common_layout(request: DecodeRequest, checks: Checks) -> None:
    seqlens, table = request.cache_seqlens, request.block_table
    assert seqlens is not None
    assert table is not None
    require(request.q.stride(-1) == 1, "q must have contiguous last dimension")
    require(request.k_cache.stride(-1) == 1, "kcache must have contiguous last dimension")
    checks.contiguous("seqlens_k", seqlens)
    require(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    checks.contiguous("tile_scheduler_metadata", request.tile_scheduler_metadata)
    checks.contiguous("num_splits", request.num_splits)


def _check_heads(request: DecodeRequest) -> None:
    require(request.k_cache.shape[1] == 64, "Currently page_block_size must be 64")
    require(request.q.shape[0] > 0, "batch size must be positive")
    if request.k_cache.shape[2] == 0:
        raise KernelExitsError("integer division by zero in the host code ends the process")
    require(
        request.q.shape[2] % request.k_cache.shape[2] == 0,
        "Number of heads in key/value must divide number of heads in query",
    )


def _check_row_shapes(request: DecodeRequest, checks: Checks) -> None:
    b, table, kcache = request.q.shape[0], request.block_table, request.k_cache
    assert table is not None
    checks.shape(
        "kcache",
        kcache,
        (*kcache.shape[:3], request.q.shape[3]),
        "num_blocks, page_block_size, num_heads_k, head_size_k",
    )
    checks.shape("seqlens_k", request.cache_seqlens, (b,), "batch_size")
    checks.shape("block_table", table, (b, table.shape[1]), "batch_size, max_num_blocks_per_seq")


def check_dense(request: DecodeRequest, checks: Checks, gpu: GpuModel) -> int:
    """Refuse what the dense bf16/fp16 interface refuses; returns the number of SM parts.

    Raises:
        KernelRefusedError: in the interface's words.
        KernelExitsError: head size 512 passes the checks and then ends the process
            (``FLASH_ASSERT(params.d == Config::HEAD_DIM_K)``).
    """
    q, seqlens, table = request.q, request.cache_seqlens, request.block_table
    assert seqlens is not None
    assert table is not None
    require(gpu.is_sm90a, "Dense decode MLA is only supported on SM90a architecture")
    checks.wordless(
        q.dtype in (torch.bfloat16, torch.float16),
        "q_dtype == torch::kBFloat16 || q_dtype == torch::kHalf",
    )
    require(request.k_cache.dtype == q.dtype, "query and key must have the same dtype")
    require(seqlens.dtype == torch.int32, "seqlens_k must have dtype int32")
    require(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    _check_common_layout(request, checks)
    _, s_q, h_q, d_qk = q.shape
    require(d_qk in (576, 512), "Only head_size_k == 576 or 512 is supported")
    require(
        request.head_dim_v == 512,
        f"Only head_size_v == {checks.generation.dense_head_v} is supported",
    )
    _check_heads(request)
    parts = dense_sm_parts(gpu, s_q, h_q, request.k_cache.shape[2])
    _check_row_shapes(request, checks)
    metadata, num_splits = request.tile_scheduler_metadata, request.num_splits
    checks.shape(
        "tile_scheduler_metadata",
        metadata,
        (parts, METADATA_WIDTH),
        "num_sm_parts, DecodingSchedMetaSize/sizeof(int)",
    )
    checks.shape("num_splits", num_splits, (q.shape[0] + 1,), "batch_size+1")
    checks.dtype("tile_scheduler_metadata", metadata, torch.int32)
    checks.dtype("num_splits", num_splits, torch.int32)
    if d_qk != 576:
        raise KernelExitsError("Assertion failed: params.d == Config::HEAD_DIM_K")
    return parts


def check_dense_fp8(request: DecodeRequest, checks: Checks, gpu: GpuModel) -> None:
    """Refuse what the dense FP8 interface refuses (the schedule is not optional there)."""
    q, seqlens, table = request.q, request.cache_seqlens, request.block_table
    metadata, num_splits = request.tile_scheduler_metadata, request.num_splits
    assert seqlens is not None
    assert table is not None
    assert metadata is not None
    assert num_splits is not None
    require(gpu.is_sm90a, "Dense FP8 MLA is only supported on SM90")
    checks.wordless(q.dtype == torch.float8_e4m3fn, "q.dtype() == torch::kFloat8_e4m3fn")
    require(request.k_cache.dtype == q.dtype, "query and key must have the same dtype")
    require(seqlens.dtype == torch.int32, "seqlens_k must have dtype int32")
    require(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    require(metadata.dtype == torch.int32, "tile_scheduler_metadata must have dtype int32")
    require(num_splits.dtype == torch.int32, "num_splits must have dtype int32")
    _check_common_layout(request, checks)
    require(q.shape[3] == 576, "Only head_size_k == 576 is supported")
    require(request.head_dim_v == 512, "Only head_size_v == 512 is supported")
    _check_heads(request)
    require(
        request.descale_q is not None and request.descale_k is not None,
        "descale is required when input dtype is fp8",
    )
    for name, tensor in (("descale_q_", request.descale_q), ("descale_k_", request.descale_k)):
        assert tensor is not None
        checks.wordless(tensor.dtype == torch.float32, f"{name}.dtype() == torch::kFloat")
        checks.shape(name, tensor, (1,), "1")
    _check_row_shapes(request, checks)
    checks.wordless(
        metadata.shape[1] == METADATA_WIDTH,
        "tile_scheduler_metadata.size(1) == TileSchedulerMetaDataSize",
    )
    checks.shape("num_splits", num_splits, (q.shape[0] + 1,), "batch_size+1")
