"""Wrong calls are refused in the words of the wheels, in the order of the C++.

The words were read out of the wheels' libraries (sglang-kernel 0.4.2.post2, 0.4.4, 0.4.5,
0.4.6.post1, 0.4.7, 0.4.10, sgl-flash-mla 1.0.0); ``test_words_in_wheels.py`` looks them up again
where the wheels are at hand.
"""

# ruff: noqa: E402 - the skip comes before the imports that need torch

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the kernel reference needs torch")

from padtrace.replay.kernels.error_text import own_words
from padtrace.replay.kernels.generations import (
    GENERATIONS,
    SGL_FLASH_MLA_1,
    SGL_KERNEL_04_2,
    SGL_KERNEL_04_5,
    SGL_KERNEL_04_7,
    SGL_KERNEL_04_10,
    Generation,
    by_key,
    for_sglang,
)
from padtrace.replay.kernels.interface import DecodeRequest, PlanRequest
from padtrace.replay.kernels.reference.gpu import B200, GpuModel
from padtrace.replay.kernels.reference.kernel import ReferenceKernel
from padtrace.replay.kernels.reference.words import KernelExitsError, NotCoveredError
from padtrace.replay.kernels.refusals import REFUSALS, good_call

OLD_SIZE = "sizeof(DecodingSchedMeta)/sizeof(int))"
NEW_SIZE = "sizeof(DecodingSchedMeta)/4)"
PARTS = "tile_scheduler_metadata must have shape (impl_meta.num_sm_parts, "
SPLITS = "num_splits must have shape (b+1)"
WIDTH = "kv must have shape (num_blocks, page_block_size, h_kv, "

# What is wrong -> words in sglang-kernel 0.4.5, words in sgl-flash-mla 1.0.
WORDS = {
    "nothing": ("taken", "taken"),
    "num_splits one too long": (SPLITS, SPLITS),
    "num_splits one too short": (SPLITS, SPLITS),
    "one SM part too few": (PARTS + OLD_SIZE, PARTS + NEW_SIZE),
    "parts and num_splits both wrong": (PARTS + OLD_SIZE, PARTS + NEW_SIZE),
    "q in float32": (
        "q must have dtype torch::kBFloat16",
        "q must have dtype ScalarType::BFloat16",
    ),
    "q in float16": (
        "q must have dtype torch::kBFloat16",
        "q must have dtype ScalarType::BFloat16",
    ),
    "q with three dimensions": ("q must have 4 dimensions",) * 2,
    "16 heads, not padded": ("Unsupported h_q: 16",) * 2,
    "96 heads": ("Unsupported h_q: 96",) * 2,
    "head size 448": ("Only head_size_k == 576 or 512 is supported for sparse decoding",) * 2,
    "head_dim_v 576": ("Only head_size_v == 512 is supported for sparse decoding",) * 2,
    "cache not quantised": ("key must have dtype fp8_e4m3fn, int8 or uint8",) * 2,
    "cache of 584 bytes per token": (
        WIDTH + "bytes_per_token)",
        WIDTH + "kv_cache_bytes_per_token(model_type))",
    ),
    "cache cut from wider pages": (
        "The whole block must be contiguous when is_fp8_cache is True for kv cache",
    )
    * 2,
    "indices in int64": (
        "indices must have dtype torch::kInt32",
        "indices must have dtype ScalarType::Int",
    ),
    "indices without s_q": ("indices must have 3 dimensions",) * 2,
    "indices of fewer rows": ("indices must have shape (b, s_q, topk)",) * 2,
    "top-k 100": ("Assertion `params.topk % TOPK_BLOCK_SIZE == 0` failed.",) * 2,
    "num_splits in int64": (
        "num_splits must have dtype torch::kInt32",
        "num_splits must have dtype ScalarType::Int",
    ),
    "causal": (
        "causal must be `false` if sparse attention is enabled.",
        "causal must be False when sparse attention is enabled",
    ),
    "not an FP8 cache": (
        "Sparse decode path requires is_fp8=true",
        "is_fp8_kvcache must be True, since only sparse attention with a quantized KV cache is "
        "supported",
    ),
}


def words_of(kernel: ReferenceKernel, request: DecodeRequest) -> str:
    try:
        kernel.flash_mla_with_kvcache(request)
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "taken"


def test_every_wrong_call_has_its_words_here() -> None:
    assert {case.name for case in REFUSALS} == set(WORDS)


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_words(case: object) -> None:
    for generation, words in zip((SGL_KERNEL_04_5, SGL_FLASH_MLA_1), WORDS[case.name], strict=True):
        kernel = ReferenceKernel(generation=generation)
        assert words_of(kernel, case.build(kernel, kernel)) == words


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda one: one.key)
def test_the_message_of_issue_30296_in_every_generation(generation: Generation) -> None:
    kernel = ReferenceKernel(generation=generation)
    case = next(one for one in REFUSALS if one.name == "num_splits one too long")
    assert words_of(kernel, case.build(kernel, kernel)) == SPLITS


def test_an_empty_batch_is_refused_without_words() -> None:
    kernel = ReferenceKernel(generation=SGL_KERNEL_04_5)
    call = good_call(kernel.device, kernel)
    empty = replace(call, q=call.q[:0], indices=call.indices[:0])
    assert words_of(kernel, empty) == (
        "Expected b > 0 to be true, but got false.  (Could this error message be improved?  If so, "
        "please report an enhancement request to PyTorch.)"
    )
    stable = ReferenceKernel(generation=SGL_FLASH_MLA_1)
    assert words_of(stable, empty) == ""


def test_order_shape_of_q_before_its_dtype_before_heads() -> None:
    kernel = ReferenceKernel(generation=SGL_KERNEL_04_5)
    call = good_call(kernel.device, kernel)
    wrong = replace(
        call,
        q=torch.zeros(3, 1, 16, 448),
        num_splits=call.num_splits[:-1].clone(),
        indices=call.indices.long(),
    )
    said = [words_of(kernel, wrong)]
    for mended in (
        {"q": torch.zeros(3, 1, 16, 576)},
        {"q": torch.zeros(3, 1, 16, 576, dtype=torch.bfloat16)},
        {"indices": call.indices},
        {"q": call.q},
        {"num_splits": call.num_splits},
    ):
        wrong = replace(wrong, **mended)
        said.append(words_of(kernel, wrong))
    assert said == [
        "Only head_size_k == 576 or 512 is supported for sparse decoding",
        "q must have dtype torch::kBFloat16",
        "indices must have dtype torch::kInt32",
        "Unsupported h_q: 16",
        SPLITS,
        "taken",
    ]


def test_architectures() -> None:
    ampere = ReferenceKernel(GpuModel("A100", 8, 0, 108))
    call = good_call(ampere.device, ReferenceKernel())
    assert words_of(ampere, call) == "Unsupported architecture for sparse decode fwd"
    dense = replace(
        call, indices=None, is_fp8_kvcache=False, block_table=torch.zeros(3, 1, dtype=torch.int32)
    )
    refusal = "Dense decode MLA is only supported on SM90a architecture"
    assert words_of(ReferenceKernel(B200), dense) == refusal


def test_v32_takes_a_topk_length_on_sm100_only() -> None:
    for gpu, words in (
        (GpuModel("H100", 9, 0, 132), "Assertion `params.topk_length == nullptr` failed."),
        (B200, "taken"),
    ):
        kernel = ReferenceKernel(gpu)
        call = good_call(kernel.device, kernel)
        call = replace(call, topk_length=torch.full((3,), 64, dtype=torch.int32))
        assert words_of(kernel, call) == words


def test_v41_is_not_covered_rather_than_guessed() -> None:
    kernel = ReferenceKernel(generation=SGL_FLASH_MLA_1)
    call = good_call(kernel.device, kernel)
    cache = torch.zeros(4, 64, 1, 528, dtype=torch.uint8)
    call = replace(call, q=call.q[..., :512].contiguous(), k_cache=cache)
    with pytest.raises(NotCoveredError, match="V41"):
        kernel.flash_mla_with_kvcache(replace(call, tile_scheduler_metadata=None, num_splits=None))
    # The same width with a schedule of tensors is V3.2 without RoPE, in SGLang's wrapper.
    assert words_of(kernel, call) == "taken"
    fp4 = replace(call, k_cache=torch.zeros(4, 64, 1, 288, dtype=torch.uint8))
    assert words_of(kernel, fp4) == "The fp4 KV cache is only supported as extra_kv"
    other = replace(call, k_cache=torch.zeros(4, 64, 1, 300, dtype=torch.uint8))
    assert words_of(kernel, other) == "Unsupported bytes_per_token for d_qk=512: 300"


def dense_call(**changes: object) -> DecodeRequest:
    call = DecodeRequest(
        q=torch.zeros(2, 1, 16, 576, dtype=torch.bfloat16),
        k_cache=torch.zeros(3, 64, 1, 576, dtype=torch.bfloat16),
        block_table=torch.zeros(2, 2, dtype=torch.int32),
        cache_seqlens=torch.tensor([5, 70], dtype=torch.int32),
        head_dim_v=512,
        tile_scheduler_metadata=None,
        num_splits=None,
    )
    return replace(call, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "taken"),
        (
            {"q": torch.zeros(2, 1, 16, 576)},
            "Expected q_dtype == torch::kBFloat16 || q_dtype == torch::kHalf to be true, but got "
            "false.  (Could this error message be improved?  If so, please report an enhancement "
            "request to PyTorch.)",
        ),
        (
            {"k_cache": torch.zeros(3, 64, 1, 576)},
            "query and key must have the same dtype",
        ),
        ({"cache_seqlens": torch.tensor([5, 70])}, "seqlens_k must have dtype int32"),
        ({"block_table": torch.zeros(2, 2)}, "block_table must have dtype torch.int32"),
        (
            {"k_cache": torch.zeros(3, 32, 1, 576, dtype=torch.bfloat16)},
            "Currently page_block_size must be 64",
        ),
        (
            {"k_cache": torch.zeros(3, 64, 3, 576, dtype=torch.bfloat16)},
            "Number of heads in key/value must divide number of heads in query",
        ),
        (
            {"cache_seqlens": torch.tensor([5, 70, 1], dtype=torch.int32)},
            "seqlens_k must have shape (batch_size)",
        ),
        (
            {"block_table": torch.zeros(1, 2, dtype=torch.int32)},
            "block_table must have shape (batch_size, max_num_blocks_per_seq)",
        ),
        (
            {
                "tile_scheduler_metadata": torch.zeros(132, 8, dtype=torch.int32),
                "num_splits": torch.zeros(4, dtype=torch.int32),
            },
            "num_splits must have shape (batch_size+1)",
        ),
        (
            {
                "tile_scheduler_metadata": torch.zeros(66, 8, dtype=torch.int32),
                "num_splits": torch.zeros(3, dtype=torch.int32),
            },
            "tile_scheduler_metadata must have shape (num_sm_parts, "
            "DecodingSchedMetaSize/sizeof(int))",
        ),
        (
            {"is_fp8_kvcache": True},
            "Dense FP8 decode is exposed via fwd_kvcache_mla_fp8, not fwd_kvcache_mla",
        ),
        ({"attn_sink": torch.zeros(16)}, "attn_sink is only supported for sparse decode"),
    ],
)
def test_dense_words(changes: dict[str, object], words: str) -> None:
    assert words_of(ReferenceKernel(generation=SGL_KERNEL_04_5), dense_call(**changes)) == words


def test_the_number_in_the_dense_head_size_message_was_mended() -> None:
    wrong = dense_call(head_dim_v=576)
    for generation, number in ((SGL_KERNEL_04_2, 576), (SGL_KERNEL_04_5, 512)):
        said = words_of(ReferenceKernel(generation=generation), wrong)
        assert said == f"Only head_size_v == {number} is supported"


def test_a_dense_call_of_head_size_512_would_end_the_process() -> None:
    call = dense_call(
        q=torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16),
        k_cache=torch.zeros(3, 64, 1, 512, dtype=torch.bfloat16),
    )
    with pytest.raises(KernelExitsError):
        ReferenceKernel().flash_mla_with_kvcache(call)


def test_dense_fp8_words() -> None:
    call = dense_call(
        q=torch.zeros(2, 1, 16, 576).to(torch.float8_e4m3fn),
        k_cache=torch.zeros(3, 64, 1, 576).to(torch.float8_e4m3fn),
        tile_scheduler_metadata=torch.zeros(132, 8, dtype=torch.int32),
        num_splits=torch.zeros(4, dtype=torch.int32),
    )
    kernel = ReferenceKernel(generation=SGL_KERNEL_04_5)
    assert words_of(kernel, call) == "descale is required when input dtype is fp8"
    scales = {"descale_q": torch.ones(1), "descale_k": torch.ones(1)}
    said = words_of(kernel, replace(call, **scales))
    assert said == "num_splits must have shape (batch_size+1)"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (PlanRequest(torch.ones(2), 64, 1), "seqlens_k must have dtype int32"),
        (
            PlanRequest(torch.ones(4, dtype=torch.int32)[::2], 64, 1),
            "seqlens_k must be contiguous",
        ),
        (PlanRequest(torch.ones(0, dtype=torch.int32), 64, 1), "batch size must be positive"),
        (PlanRequest(torch.ones(2, dtype=torch.int32), 64, 0), "num_heads_k must be positive"),
        (
            PlanRequest(torch.ones(2, dtype=torch.int32), 64, 1, None, True, 64),
            "num_heads_q must be provided when topk is provided",
        ),
        (
            PlanRequest(torch.ones(2, dtype=torch.int32), 64, 1, 64, False, 64),
            "Sparse decoding requires is_fp8_kvcache=true",
        ),
        (
            PlanRequest(torch.ones(2, dtype=torch.int32), 64, 1, 0, True, 64),
            "num_heads_q must be positive",
        ),
    ],
)
def test_plan_words(request_: PlanRequest, words: str) -> None:
    with pytest.raises(RuntimeError) as refused:
        ReferenceKernel().get_mla_metadata(request_)
    assert str(refused.value) == words


def test_own_words_drop_place_and_backtrace() -> None:
    assert own_words("num_splits must have shape (b+1)") == "num_splits must have shape (b+1)"
    assert (
        own_words(
            "sparse_attn_decode_interface, /flashmla/csrc_legacy/api/sparse_decode.cpp:412, "
            "num_splits must have shape (b+1)"
        )
        == "num_splits must have shape (b+1)"
    )
    assert (
        own_words(
            "q must have 4 dimensions\nException raised from sparse_attn_decode_interface at x.h:1 "
            "(most recent call first):\nframe #0: ..."
        )
        == "q must have 4 dimensions"
    )
    assert (
        own_words("Assertion error (/a/b.cuh:7): Assertion `params.h_kv == 1` failed.")
        == "Assertion `params.h_kv == 1` failed."
    )


def test_which_generation_a_release_calls() -> None:
    found = {version: for_sglang(version).key for version in ("0.5.12", "0.5.15", "0.5.16")}
    assert found == {
        "0.5.12": "sgl-kernel-0.4.2",
        "0.5.15": "sgl-kernel-0.4.2",
        "0.5.16": "sgl-kernel-0.4.5",
    }
    assert for_sglang("0.5.17") is for_sglang("0.5.18") is SGL_KERNEL_04_5
    assert for_sglang("0.5.20.post1") is SGL_KERNEL_04_7
    assert for_sglang("0.5.23") is for_sglang("a commit") is SGL_FLASH_MLA_1
    assert by_key("sgl-kernel-0.4.10") is SGL_KERNEL_04_10
