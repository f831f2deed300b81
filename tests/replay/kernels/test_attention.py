"""Output and lse against plain softmax attention, and what must not change them."""

# ruff: noqa: E402 - the skip comes before the imports that need torch

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the kernel reference needs torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from padtrace.replay.kernels.interface import DecodeRequest, PlanRequest
from padtrace.replay.kernels.launch_shapes import LaunchShapes
from padtrace.replay.kernels.reference.gpu import GpuModel
from padtrace.replay.kernels.reference.kernel import ReferenceKernel
from padtrace.replay.kernels.reference.kv_format import V4, V32, dequantize_pages, quantize_pages
from padtrace.replay.kernels.tensors import build_request

from .oracle import plain_attention

CPU = torch.device("cpu")
SCALE = 576**-0.5


def sparse_request(rows: int, heads: int = 64, topk: int = 128, seed: int = 0) -> DecodeRequest:
    launch = LaunchShapes((rows, 1, heads, 576), indices_shape=(rows, 1, topk))
    return build_request(launch, None, CPU, seed, values=True)


def planned(kernel: ReferenceKernel, request: DecodeRequest) -> DecodeRequest:
    assert request.cache_seqlens is not None
    assert request.indices is not None
    heads, topk = request.q.shape[2], request.indices.shape[2]
    plan = kernel.get_mla_metadata(
        PlanRequest(request.cache_seqlens, heads * request.q.shape[1], 1, heads, True, topk)
    )
    return replace(
        request,
        tile_scheduler_metadata=plan.tile_scheduler_metadata,
        num_splits=plan.num_splits,
    )


def close(out: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal up to the one rounding to bfloat16, 2**-8 of the value."""
    return bool(((out.double() - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-12).all())


def test_sparse_equals_plain_attention() -> None:
    request = sparse_request(3)
    answer = ReferenceKernel().flash_mla_with_kvcache(planned(ReferenceKernel(), request))
    keys = dequantize_pages(request.k_cache, V32).reshape(-1, 576)
    assert request.indices is not None
    for row in range(3):
        slots = request.indices[row, 0].long()
        out, lse = plain_attention(request.q[row, 0], keys[slots.clamp_min(0)], slots != -1, SCALE)
        assert close(answer.out[row, 0], out)
        assert torch.allclose(answer.lse[row, :, 0].double(), lse, atol=1e-6)
    assert answer.hazards == ()


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.sampled_from([64, 128, 192]), st.integers(1, 160), st.integers(1, 160))
def test_output_does_not_depend_on_the_split(rows: int, topk: int, one: int, other: int) -> None:
    request = sparse_request(rows, topk=topk, seed=rows)
    answers = []
    for sms in (one, other):
        kernel = ReferenceKernel(GpuModel("made up", 9, 0, sms))
        answers.append(kernel.flash_mla_with_kvcache(planned(kernel, request)))
    assert close(answers[0].out, answers[1].out.double())
    assert torch.allclose(answers[0].lse, answers[1].lse, atol=1e-6)


def test_nothing_to_attend_to_gives_zero_and_plus_infinity() -> None:
    request = sparse_request(2)
    assert request.indices is not None
    request.indices[1] = -1
    for sms in (1, 132):
        kernel = ReferenceKernel(GpuModel("made up", 9, 0, sms))
        answer = kernel.flash_mla_with_kvcache(planned(kernel, request))
        assert bool((answer.out[1] == 0).all())
        assert bool((answer.lse[1] == torch.inf).all())
        assert bool(answer.lse[0].isfinite().all())


def test_padded_query_rows_leave_real_rows_alone() -> None:
    real = sparse_request(4, seed=9)
    padded = sparse_request(6, seed=9)
    assert real.indices is not None
    assert padded.indices is not None
    padded.q[:4], padded.q[4:] = real.q, 0
    padded.indices[:4], padded.indices[4:] = real.indices, -1
    padded = replace(padded, k_cache=real.k_cache)
    kernel = ReferenceKernel()
    without = kernel.flash_mla_with_kvcache(planned(kernel, real))
    with_padding = kernel.flash_mla_with_kvcache(planned(kernel, padded))
    assert with_padding.plan.num_splits.tolist() != without.plan.num_splits.tolist()
    assert torch.equal(with_padding.out[:4], without.out)
    assert bool((with_padding.out[4:] == 0).all())


def test_heads_padded_to_64() -> None:
    full = sparse_request(2, seed=4)
    few = full.q.clone()
    few[:, :, 16:] = 0
    kernel = ReferenceKernel()
    whole = kernel.flash_mla_with_kvcache(planned(kernel, full))
    padded = kernel.flash_mla_with_kvcache(planned(kernel, replace(full, q=few)))
    assert torch.equal(padded.out[:, :, :16], whole.out[:, :, :16])


def test_nan_in_an_unused_page_changes_nothing() -> None:
    request = sparse_request(2, seed=5)
    assert request.indices is not None
    # Slots of page 0 are not listed, but index -1 makes SM90 touch it (block 0, last token).
    request.indices[(request.indices >= 0) & (request.indices < 64)] += 64
    kernel = ReferenceKernel()
    clean = kernel.flash_mla_with_kvcache(planned(kernel, request))
    request.k_cache.view(torch.uint8)[0] = 0xFF
    spoiled = kernel.flash_mla_with_kvcache(planned(kernel, request))
    assert torch.equal(clean.out, spoiled.out)
    assert torch.equal(clean.lse, spoiled.lse)


def test_nan_in_a_used_page_reaches_only_the_rows_that_use_it() -> None:
    request = sparse_request(2, seed=6)
    assert request.indices is not None
    request.indices[1] = torch.where(request.indices[1] == 70, -1, request.indices[1])
    request.indices[0, 0, 3] = 70
    request.k_cache.view(torch.uint8)[1, 6] = 0xFF
    kernel = ReferenceKernel()
    answer = kernel.flash_mla_with_kvcache(planned(kernel, request))
    assert bool(answer.out[0].isnan().all())
    assert not bool(answer.out[1].isnan().any())


@pytest.mark.parametrize("index", [32 * 64, 2**31 - 1, -2, -(2**31)])
def test_an_index_outside_the_cache_is_a_hazard_not_a_crash(index: int) -> None:
    request = sparse_request(2, seed=7)
    assert request.indices is not None
    request.indices[0, 0, 5] = index
    kernel = ReferenceKernel()
    answer = kernel.flash_mla_with_kvcache(planned(kernel, request))
    assert len(answer.hazards) == 1
    assert "row 0: 1 indices lie outside the cache of 2048 tokens" in answer.hazards[0]
    assert bool(answer.out[0].isnan().any())
    assert not bool(answer.out[1].isnan().any())


def v4_request(topk_length: list[int], extra: bool) -> DecodeRequest:
    generator = torch.Generator().manual_seed(8)
    rows = len(topk_length)

    def cache() -> torch.Tensor:
        values = torch.randn(4, 64, 1, 512, generator=generator).clamp(-1, 1) / 4
        return quantize_pages(values, V4)

    def slots(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, 1, count), generator=generator, dtype=torch.int32)

    return DecodeRequest(
        q=torch.randn(rows, 1, 64, 512, generator=generator).to(torch.bfloat16),
        k_cache=cache(),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=None,
        num_splits=None,
        is_fp8_kvcache=True,
        indices=slots(128),
        topk_length=torch.tensor(topk_length, dtype=torch.int32),
        extra_k_cache=cache() if extra else None,
        extra_indices_in_kvcache=slots(64) if extra else None,
        attn_sink=torch.linspace(-2, 2, 64) if extra else None,
    )


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("sms", [2, 132])
def test_topk_length_extra_cache_and_sink(extra: bool, sms: int) -> None:
    request = v4_request([0, 1, 65, 128], extra)
    answer = ReferenceKernel(GpuModel("made up", 9, 0, sms)).flash_mla_with_kvcache(request)
    keys = dequantize_pages(request.k_cache, V4).reshape(-1, 512)
    assert request.indices is not None
    for row, length in enumerate((0, 1, 65, 128)):
        chosen = keys[request.indices[row, 0].long()]
        valid = torch.arange(128) < length
        if extra:
            more = dequantize_pages(request.extra_k_cache, V4).reshape(-1, 512)
            chosen = torch.cat([chosen, more[request.extra_indices_in_kvcache[row, 0].long()]])
            valid = torch.cat([valid, torch.ones(64, dtype=torch.bool)])
        out, lse = plain_attention(request.q[row, 0], chosen, valid, 512**-0.5)
        if extra:
            out = out * torch.sigmoid(lse - request.attn_sink.double()).unsqueeze(-1)
        assert close(answer.out[row, 0], out)
        assert torch.allclose(answer.lse[row, :, 0].double(), lse, atol=1e-6)


def dense_request(lengths: list[int], s_q: int, heads: int, causal: bool) -> DecodeRequest:
    generator = torch.Generator().manual_seed(2)
    rows, width = len(lengths), 8
    cache = torch.randn(rows * width, 64, 1, 576, generator=generator).to(torch.bfloat16) / 4
    table = torch.randperm(rows * width, generator=generator).reshape(rows, width)
    return DecodeRequest(
        q=torch.randn(rows, s_q, heads, 576, generator=generator).to(torch.bfloat16),
        k_cache=cache,
        block_table=table.to(torch.int32),
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        head_dim_v=512,
        tile_scheduler_metadata=None,
        num_splits=None,
        causal=causal,
    )


def check_dense(request: DecodeRequest, answer: object, scale: float) -> None:
    _, s_q, _, _ = request.q.shape
    for row, length in enumerate(request.cache_seqlens.tolist()):
        keys = request.k_cache[request.block_table[row].long(), :, 0].reshape(-1, 576).double()
        for token in range(s_q):
            seen = length - (s_q - 1 - token if request.causal else 0)
            valid = torch.arange(keys.shape[0]) < seen
            out, lse = plain_attention(request.q[row, token], keys, valid, scale)
            assert close(answer.out[row, token], out)
            assert torch.allclose(answer.lse[row, :, token].double(), lse, atol=1e-6)


@pytest.mark.parametrize("sms", [3, 132])
@pytest.mark.parametrize(("s_q", "causal"), [(1, False), (1, True), (2, True), (2, False)])
def test_dense_equals_plain_attention(sms: int, s_q: int, causal: bool) -> None:
    request = dense_request([500, 0, 3, 64, 65], s_q, 16, causal)
    answer = ReferenceKernel(GpuModel("made up", 9, 0, sms)).flash_mla_with_kvcache(request)
    # One q token sees the whole row, causal or not.
    check_dense(replace(request, causal=causal and s_q > 1), answer, SCALE)
    assert answer.hazards == ()


def test_dense_fp8_equals_plain_attention() -> None:
    request = dense_request([500, 0, 65], 1, 16, False)
    request = replace(
        request,
        q=request.q.to(torch.float8_e4m3fn),
        k_cache=request.k_cache.to(torch.float8_e4m3fn),
        descale_q=torch.tensor([0.5]),
        descale_k=torch.tensor([2.0]),
    )
    for sms in (2, 132):
        kernel = ReferenceKernel(GpuModel("made up", 9, 0, sms))
        plan = kernel.get_mla_metadata(PlanRequest(request.cache_seqlens, 16, 1, 16, True))
        answer = kernel.flash_mla_with_kvcache(
            replace(
                request,
                tile_scheduler_metadata=plan.tile_scheduler_metadata,
                num_splits=plan.num_splits,
            )
        )
        # The scales multiply logits (0.5 * 2) and values (2).
        halved = replace(answer, out=answer.out.double() / 2)
        check_dense(request, halved, SCALE)


def test_a_page_outside_the_cache_is_a_hazard() -> None:
    request = dense_request([65, 64], 1, 16, False)
    request.block_table[0, 1] = 9999
    answer = ReferenceKernel().flash_mla_with_kvcache(request)
    assert [line.split(":")[0] for line in answer.hazards] == ["row 0"]
    assert not bool(answer.out[1].isnan().any())


def test_a_schedule_of_another_batch_is_followed_and_told() -> None:
    request = sparse_request(3, seed=11)
    kernel = ReferenceKernel()
    good = planned(kernel, request)
    short = planned(kernel, sparse_request(2, seed=11))
    # The scheduler rows of two requests with num_splits of three: row 2 is never visited, its two
    # partial results (128 tokens, 2 blocks, one a part) are read but never written.
    mixed = replace(good, tile_scheduler_metadata=short.tile_scheduler_metadata)
    answer = kernel.flash_mla_with_kvcache(mixed)
    assert [line for line in answer.hazards if line.startswith("row 2: partial result")]
    assert bool(answer.out[2].isnan().all())
    right = kernel.flash_mla_with_kvcache(good)
    assert torch.equal(answer.out[:2], right.out[:2])


def test_num_splits_that_stand_still_zero_the_row() -> None:
    request = planned(ReferenceKernel(), sparse_request(2, seed=12))
    request.num_splits[:] = 0
    answer = ReferenceKernel().flash_mla_with_kvcache(request)
    # No partial results: the combination writes zeros and +inf over everything.
    assert bool((answer.out == 0).all())
    assert bool((answer.lse == torch.inf).all())
    assert len(answer.hazards) == 2
