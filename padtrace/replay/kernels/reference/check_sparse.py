"""Argument checks of the sparse FP8 decode, in the order of the C++.

Source: ``csrc/api/sparse_decode.h`` (``sparse_attn_decode_interface``), ``csrc/python_api.cpp``
(``fwd_kvcache_mla``), the launchers' ``KU_ASSERT`` in ``csrc/sm90/decode/sparse_fp8/
splitkv_mla.cuh`` and ``csrc/sm100/decode/head64/kernel.cuh``, sgl-project/FlashMLA branch ``sgl``;
the Python asserts of ``sgl_kernel/flash_mla.py`` and ``flash_mla/flash_mla_interface.py`` in the
wheels. Page size is not checked there (any size is taken); that DSA uses 64 is SGLang's own assert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padtrace.replay.kernels.generations import Generation
from padtrace.replay.kernels.interface import DecodeRequest
from padtrace.replay.kernels.reference.gpu import GpuModel
from padtrace.replay.kernels.reference.kv_format import FORMATS, V4, V32, V32_NO_ROPE, KvFormat
from padtrace.replay.kernels.reference.schedule import (
    METADATA_WIDTH,
    SparseImplementation,
    sparse_implementation,
)
from padtrace.replay.kernels.reference.words import (
    Checks,
    KernelRefusedError,
    NotCoveredError,
    launcher_assert,
    refuse,
    require,
)

_CACHE_DTYPES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
_FORMAT_NAMES = ("V32", "V32_NO_ROPE", "V4", "V41", "V41_FP4")
_V41_FP4_BYTES = 288


@dataclass(frozen=True)
class SparseCall:
    """What the checks found out: sizes, layout and the kernel that would run."""

    b: int
    s_q: int
    h_q: int
    d_qk: int
    topk: int
    extra_topk: int
    kv_format: KvFormat
    implementation: SparseImplementation


def check_sparse_wrapper(request: DecodeRequest, generation: Generation) -> None:
    """The asserts of the Python wrapper, which come before any C++."""
    if generation.stable_abi:
        assert not request.causal, "causal must be False when sparse attention is enabled"
        assert request.is_fp8_kvcache, (
            "is_fp8_kvcache must be True, since only sparse attention with a quantized KV cache is "
            "supported"
        )
        return
    assert not request.causal, "causal must be `false` if sparse attention is enabled."
    assert (request.descale_q is None) == (request.descale_k is None), (
        "descale_q and descale_k should be both None or both not None"
    )
    if generation.wrapper_asserts_fp8:
        assert request.is_fp8_kvcache, "is_fp8_kvcache must be True for sparse attention"
    require(request.is_fp8_kvcache, "Sparse decode path requires is_fp8=true")


def check_sparse(request: DecodeRequest, checks: Checks, gpu: GpuModel) -> SparseCall:
    """Refuse what the interface refuses before it looks at the schedule.

    Raises:
        KernelRefusedError: in the interface's words.
        NotCoveredError: a KV format that the reference does not read (V4.1).
    """
    assert request.indices is not None
    q, kv, indices = request.q, request.k_cache, request.indices
    for name, tensor, ndim in (("q", q, 4), ("kv", kv, 4), ("indices", indices, 3)):
        checks.ndim(name, tensor, ndim)
    b, s_q, h_q, d_qk = q.shape
    topk = indices.shape[2]
    extra = request.extra_indices_in_kvcache
    extra_topk = extra.shape[-1] if extra is not None else 0
    checks.wordless(b > 0, "b > 0")
    checks.wordless(s_q > 0, "s_q > 0")
    checks.wordless(h_q > 0, "h_q > 0")
    require(
        kv.shape[2] == 1, "Currently only MQA (i.e. h_kv == 1) is supported for sparse decoding"
    )
    require(d_qk in (576, 512), "Only head_size_k == 576 or 512 is supported for sparse decoding")
    require(request.head_dim_v == 512, "Only head_size_v == 512 is supported for sparse decoding")
    checks.wordless(topk > 0, "topk > 0")
    _check_extra_pairing(request)
    _check_dtypes(request, checks)
    _check_layouts(request, checks)
    kv_format = _format(request, d_qk, checks.generation)
    _check_shapes(request, checks, kv_format)
    require(h_q in (64, 128), f"Unsupported h_q: {h_q}")
    require(gpu.is_sm90a or gpu.is_sm100f, "Unsupported architecture for sparse decode fwd")
    implementation = sparse_implementation(gpu, s_q, h_q, d_qk)
    return SparseCall(b, s_q, h_q, d_qk, topk, extra_topk, kv_format, implementation)


def _check_extra_pairing(request: DecodeRequest) -> None:
    indices, length = request.extra_indices_in_kvcache, request.extra_topk_length
    if request.extra_k_cache is not None:
        require(
            indices is not None,
            "extra_indices_in_kvcache must be provided when extra_kcache is provided for sparse "
            "attention",
        )
        return
    require(
        indices is None,
        "extra_indices_in_kvcache must not be provided when extra_k_cache is not provided",
    )
    require(
        length is None, "extra_topk_length must not be provided when extra_k_cache is not provided"
    )


def _check_dtypes(request: DecodeRequest, checks: Checks) -> None:
    checks.dtype("q", request.q, torch.bfloat16)
    require(request.k_cache.dtype in _CACHE_DTYPES, "key must have dtype fp8_e4m3fn, int8 or uint8")
    extra = request.extra_k_cache
    require(
        extra is None or extra.dtype in _CACHE_DTYPES,
        "extra k cache must have dtype fp8_e4m3fn, int8 or uint8",
    )
    checks.dtype("indices", request.indices, torch.int32)
    checks.dtype("topk_length", request.topk_length, torch.int32)
    checks.dtype("attn_sink", request.attn_sink, torch.float32)
    checks.dtype("tile_scheduler_metadata", request.tile_scheduler_metadata, torch.int32)
    checks.dtype("num_splits", request.num_splits, torch.int32)
    checks.dtype("extra_indices", request.extra_indices_in_kvcache, torch.int32)
    checks.dtype("extra_topk_length", request.extra_topk_length, torch.int32)


def _check_layouts(request: DecodeRequest, checks: Checks) -> None:
    checks.last_dim("q", request.q)
    checks.last_dim("kv", request.k_cache)
    checks.last_dim("indices", request.indices)
    checks.contiguous("topk_length", request.topk_length)
    checks.contiguous("attn_sink", request.attn_sink)
    checks.contiguous("tile_scheduler_metadata", request.tile_scheduler_metadata)
    checks.contiguous("num_splits", request.num_splits)
    checks.last_dim("extra_kv", request.extra_k_cache)
    checks.last_dim("extra_indices", request.extra_indices_in_kvcache)
    checks.contiguous("extra_topk_length", request.extra_topk_length)


def _format(request: DecodeRequest, d_qk: int, generation: Generation) -> KvFormat:
    """The layout: by d_qk alone, or by name and bytes where the wheel names formats."""
    if not generation.names_formats:
        return V32 if d_qk == 576 else V4
    named = request.kv_format
    if named is not None:
        require(
            named in _FORMAT_NAMES,
            f"Unknown kv_format: {named}. Expected one of V32, V32_NO_ROPE, V4, V41, V41_FP4",
        )
        for known in FORMATS:
            if known.name == named and known.d_qk == d_qk:
                return known
        raise NotCoveredError(f"the reference does not read KV format {named} with d_qk {d_qk}")
    if d_qk == 576:
        return V32
    width = request.k_cache.shape[-1]
    if width == V4.bytes_per_token:
        return V4
    if width == _V41_FP4_BYTES:
        refuse("The fp4 KV cache is only supported as extra_kv")
    if width == V32_NO_ROPE.bytes_per_token:
        if request.tile_scheduler_metadata is not None:
            # SGLang's wrappers name the format when the schedule travels as tensors.
            return V32_NO_ROPE
        raise NotCoveredError("the reference does not read KV format V41 (528 bytes per token)")
    raise KernelRefusedError(f"Unsupported bytes_per_token for d_qk=512: {width}")


def _check_shapes(request: DecodeRequest, checks: Checks, kv_format: KvFormat) -> None:
    b, s_q, h_q, _ = request.q.shape
    blocks, page = request.k_cache.shape[:2]
    width = kv_format.bytes_per_token
    named = checks.generation.names_formats
    spelled = "kv_cache_bytes_per_token(model_type)" if named else "bytes_per_token"
    extra_spelled = "kv_cache_bytes_per_token(extra_model_type)" if named else "bytes_per_token"
    kv, extra = request.k_cache, request.extra_k_cache
    checks.shape(
        "kv", kv, (blocks, page, 1, width), f"num_blocks, page_block_size, h_kv, {spelled}"
    )
    if extra is not None:
        checks.shape(
            "extra_kv",
            extra,
            (*extra.shape[:2], 1, width),
            f"extra_num_blocks, extra_page_block_size, h_kv, {extra_spelled}",
        )
    whole = "The whole block must be contiguous when is_fp8_cache is True for"
    require(kv.stride(1) == width, f"{whole} kv cache")
    require(extra is None or extra.stride(1) == width, f"{whole} extra kv cache")
    assert request.indices is not None
    checks.shape("indices", request.indices, (b, s_q, request.indices.shape[2]), "b, s_q, topk")
    checks.shape("topk_length", request.topk_length, (b,), "b")
    checks.shape("attn_sink", request.attn_sink, (h_q,), "h_q")
    extra_indices = request.extra_indices_in_kvcache
    if extra_indices is not None:
        want = (b, s_q, extra_indices.shape[-1])
        checks.shape("extra_indices", extra_indices, want, "b, s_q, extra_topk")
    checks.shape("extra_topk_length", request.extra_topk_length, (b,), "b")


def check_sparse_schedule(
    call: SparseCall, metadata: torch.Tensor, num_splits: torch.Tensor, checks: Checks
) -> None:
    """The schedule tensors against the call: this is where ``(b+1)`` comes from."""
    size_of = "4" if checks.generation.names_formats else "sizeof(int)"
    checks.shape(
        "tile_scheduler_metadata",
        metadata,
        (call.implementation.num_sm_parts, METADATA_WIDTH),
        f"impl_meta.num_sm_parts, sizeof(DecodingSchedMeta)/{size_of}",
    )
    checks.shape("num_splits", num_splits, (call.b + 1,), "b+1")


def check_sparse_launch(call: SparseCall, request: DecodeRequest) -> None:
    """The asserts of the launcher, after the schedule and before the kernel."""
    if call.implementation.name != "sm90":
        launcher_assert(call.topk % 64 == 0, "params.topk % B_TOPK == 0")
        if call.implementation.name != "sm100-head128":
            launcher_assert(call.extra_topk % 64 == 0, "params.extra_topk % B_TOPK == 0")
        if call.kv_format is V4:
            # TMA walks the cache in steps of one token without its scales.
            aligned = request.k_cache.stride(0) % 576 == 0
            stride, step = (
                ("stride_kv_block", "TMA_K_STRIDE_FOR_DECODING")
                if call.implementation.name == "sm100-head128"
                else ("k_batch_stride", "TMA_K_STRIDE")
            )
            launcher_assert(aligned, f"{stride} % {step} == 0")
        return
    launcher_assert(call.topk % 64 == 0, "params.topk % TOPK_BLOCK_SIZE == 0")
    if call.kv_format is not V4:
        launcher_assert(request.extra_k_cache is None, "params.extra_kv == nullptr")
        launcher_assert(request.topk_length is None, "params.topk_length == nullptr")
