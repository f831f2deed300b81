"""The faithful level of the indexer: SGLang's `Indexer` code runs, only its kernels are replaced.

Runs `Indexer.forward_cuda`, `_forward_cuda_k_only`, `_get_topk_paged` and the schedule metadata
as on a GPU. Needs SGLANG_DISABLE_DSA_INDEXER_FUSION=1, which the lab's environment sets.
Stand-ins raise ValueError where the kernel refuses the shapes.
"""

import sys
from types import ModuleType
from typing import Any

import torch

from padtrace.lab.standins.fp8 import quantize_blocks
from padtrace.lab.standins.targets import first_present, first_with, replace

_INDEX_HEAD_DIM = 128
_BLOCK_SCALE_BYTES = 4
_HOPPER_SM_COUNT = 132


def get_num_sms() -> int:
    """Streaming multiprocessors of the GPU stood in for (H200)."""
    return _HOPPER_SM_COUNT


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int
) -> torch.Tensor:
    """An empty schedule, int32 [num_sms + 1, 2]; the stand-in below does not follow it."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
) -> torch.Tensor:
    """Logits of zero, float32 [batch * next_n, max_context_len].

    q: [batch, next_n, heads, dim]. Raises ValueError unless context_lens and block_table have
    batch rows and weights batch * next_n.
    """
    batch, next_n = q.shape[:2]
    found = (context_lens.shape[0], block_table.shape[0], weights.shape[0])
    if found != (batch, batch, batch * next_n):
        raise ValueError(
            f"fp8_paged_mqa_logits: q {tuple(q.shape)}, but context_lens, block_table and weights "
            f"have {found} rows"
        )
    return torch.zeros(batch * next_n, max_context_len)


def install() -> None:
    """Point the indexer at its CUDA code and that code at the stand-ins below."""
    indexer = first_present("sglang.srt.layers.attention.dsa.dsa_indexer")
    backend = first_present("sglang.srt.layers.attention.dsa_backend")
    deep_gemm = _deep_gemm()
    # Both modules import deep_gemm only when they believe in CUDA, so there is nothing to replace.
    vars(indexer).update(_is_cuda=True, deep_gemm=deep_gemm)
    vars(backend).update(is_cuda=lambda: True, deep_gemm=deep_gemm)
    # Newer releases import it inside functions. Not a stub package on the path: SGLang would find
    # it early and turn on its fp8 matrix products.
    sys.modules["deep_gemm"] = deep_gemm
    _replace_quantizers(indexer)
    import sgl_kernel  # the lab's own, in padtrace/lab/site

    replace(sgl_kernel, "fast_topk_transform_fused", fast_topk_transform_fused)
    replace(indexer.Indexer, "_get_topk_ragged", _get_topk_ragged)
    replace(indexer.Indexer, "_weights_proj_bf16_in_fp32_out", _weights_projection)
    # The CPU rope returns another rank for the head-less key; the values do not matter here.
    replace(indexer.Indexer, "_update_rope_guarded", staticmethod(lambda dst, src: None))
    replace(indexer.Indexer, "forward", indexer.Indexer.forward_cuda)


def _deep_gemm() -> ModuleType:
    module = ModuleType("deep_gemm")
    for function in (get_num_sms, get_paged_mqa_logits_metadata, fp8_paged_mqa_logits):
        setattr(module, function.__name__, function)
    return module


def _replace_quantizers(indexer: ModuleType) -> None:
    kernels = first_with(
        "act_quant",
        "sglang.kernels.ops.quantization.act_quant_triton",
        "sglang.kernels.ops.attention.dsa.triton_kernel",
        "sglang.srt.layers.attention.dsa.triton_kernel",
    )
    replace(kernels, "act_quant", act_quant)
    replace(indexer, "rotate_activation", lambda x: x)  # Hadamard transform: values only
    replace(indexer, "can_use_dsa_fused_store", lambda *dtypes_and_page: True)
    replace(indexer, "fused_store_index_k_cache", fused_store_index_k_cache)


def act_quant(
    x: torch.Tensor, block_size: int = 128, scale_fmt: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blockwise fp8, with plain float32 scales whatever `scale_fmt` says."""
    return quantize_blocks(x, block_size)


def fused_store_index_k_cache(
    key: torch.Tensor, cache: torch.Tensor, out_cache_loc: torch.Tensor, page_size: int
) -> None:
    """Quantise the keys and write them into their pages: all values first, then all scales.

    key: [n, 128]; cache: uint8 [pages, page_size * (128 + 4)]; out_cache_loc: [n] token slots.
    Raises ValueError when the rows of key and out_cache_loc differ.
    """
    rows = key.shape[0]
    if rows != out_cache_loc.shape[0]:
        raise ValueError(
            f"fused_store_index_k_cache: {rows} keys for {out_cache_loc.shape[0]} locations"
        )
    quantized, scales = quantize_blocks(key.reshape(rows, -1), _INDEX_HEAD_DIM)
    slots = out_cache_loc.long()
    page, offset = slots // page_size, slots % page_size
    pages = cache.view(cache.shape[0], -1)
    value_bytes = page_size * _INDEX_HEAD_DIM
    values = pages[:, :value_bytes].view(-1, page_size, _INDEX_HEAD_DIM)
    values[page, offset] = quantized.view(torch.uint8)
    scale_bytes = pages[:, value_bytes:].view(-1, page_size, _BLOCK_SCALE_BYTES)
    scale_bytes[page, offset] = scales.contiguous().view(torch.uint8).view(-1, _BLOCK_SCALE_BYTES)


def fast_topk_transform_fused(
    score: torch.Tensor,
    lengths: torch.Tensor,
    page_table_size_1: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first `lengths` physical slots of every row (all scores are equal here), then -1.

    score: [n, width]; lengths: [n]; page_table_size_1: [n or bs, width]; cu_seqlens_q: [bs + 1].
    Returns int32 [n, topk]. Raises ValueError when the rows of score and lengths differ.
    """
    rows = score.shape[0]
    if lengths.shape[0] != rows:
        raise ValueError(f"fast_topk_transform_fused: {rows} rows, {lengths.shape[0]} lengths")
    row = torch.arange(rows)
    if page_table_size_1.shape[0] != rows:  # one table row per request, several query rows each
        ends = cu_seqlens_q[1:].contiguous()
        row = torch.searchsorted(ends, row.to(ends.dtype), right=True)
    column = torch.arange(topk)
    slots = page_table_size_1[row][:, column.clamp(max=page_table_size_1.shape[1] - 1)]
    return torch.where(column < lengths[:, None], slots, -1).to(torch.int32)


def _weights_projection(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = self.weights_proj.weight
    return x.float() @ weight.float().t()


def _get_topk_ragged(
    self: Any,
    enable_dual_stream: bool,
    forward_batch: Any,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
    topk_result: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replaced whole, alone of the indexer's methods: the real one insists on a CUDA device.

    Returns int32 [rows of q, index_topk]; rows without a planned length select nothing (-1).
    """
    lengths = metadata.get_seqlens_expanded()
    planned = lengths.shape[0]
    result = torch.full((q_fp8.shape[0], self.index_topk), -1, dtype=torch.int32)
    scores = torch.zeros(planned, self.index_topk)
    result[:planned] = metadata.topk_transform(
        scores, self.index_topk, batch_idx_list=metadata.get_token_to_batch_idx()
    )
    return result
