"""FP8 pages: bytes where the layout says, values back within what FP8 can hold."""

# ruff: noqa: E402 - the skip comes before the imports that need torch

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the kernel reference needs torch")

from padtrace.replay.kernels.reference.kv_format import (
    FORMATS,
    V4,
    V32,
    V32_NO_ROPE,
    KvFormat,
    dequantize_pages,
    quantize_pages,
    read_slots,
)


def test_bytes_per_token() -> None:
    # V3.2: 512 FP8 + 4 float32 scales + 64 bfloat16 = 512 + 16 + 128.
    assert V32.bytes_per_token == 656
    # Without RoPE: 512 + 16. V4: 448 FP8 + 64 bfloat16 + 7 scales and 1 unused byte.
    assert V32_NO_ROPE.bytes_per_token == 528
    assert V4.bytes_per_token == 584


def test_one_token_byte_by_byte_in_v32() -> None:
    # Largest value of the first 128: 448 -> scale 448/448 = 1. All others 0 -> the smallest
    # scale 1e-4, up to a power of two: 2**-13 = 0.000122.
    page = torch.zeros(1, 1, 1, 576)
    page[0, 0, 0, 0], page[0, 0, 0, 1], page[0, 0, 0, 512] = 448.0, -2.0, 1.0
    raw = quantize_pages(page, V32).view(torch.uint8)[0, 0, 0]
    # e4m3: 448 = 1.75 * 2**8 is 0 1111 110; -2 is 1 1000 000.
    assert raw[:3].tolist() == [0x7E, 0xC0, 0x00]
    scales = raw[512:528].view(torch.float32).tolist()
    assert scales == [1.0, 2.0**-13, 2.0**-13, 2.0**-13]
    # bfloat16 1.0 is 0x3F80, low byte first.
    assert raw[528:532].tolist() == [0x80, 0x3F, 0x00, 0x00]


def test_scales_follow_the_whole_page_in_v4() -> None:
    page = torch.zeros(1, 2, 1, 512)
    page[0, 1, 0, 64] = 448.0
    raw = quantize_pages(page, V4).view(torch.uint8).reshape(-1)
    # Two tokens of 448 + 128 bytes, then two of 8 bytes. Token 1, second group of 64 values.
    assert raw[576 + 64] == 0x7E
    # e8m0 holds the exponent + 127: 1 is 127, 2**-13 is 114; the eighth byte is unused.
    assert raw[1152:1160].tolist() == [114] * 7 + [0]
    assert raw[1160:1168].tolist() == [114, 127, *([114] * 5), 0]


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda one: one.name)
def test_values_come_back(kv_format: KvFormat) -> None:
    generator = torch.Generator().manual_seed(3)
    pages = torch.randn(3, 16, 1, kv_format.d_qk, generator=generator).to(torch.bfloat16)
    back = dequantize_pages(quantize_pages(pages, kv_format), kv_format)
    nope = slice(0, kv_format.d_nope)
    # e4m3 has 3 mantissa bits: half a step is 2**-4 of the value, plus the subnormal step.
    allowed = pages[..., nope].double().abs() / 16 + 2.0**-9 * 8
    assert bool(((back - pages)[..., nope].double().abs() <= allowed).all())
    assert torch.equal(back[..., kv_format.d_nope :], pages[..., kv_format.d_nope :])


def test_a_scale_is_rounded_to_bfloat16_on_reading() -> None:
    # SGLang writes amax / 448 as it is. 1 + 2**-9 has too many bits for bfloat16 (8): read as 1.
    page = torch.zeros(1, 1, 1, 576)
    page[0, 0, 0, 0] = 448.0
    cache = quantize_pages(page, V32)
    cache.view(torch.uint8)[0, 0, 0, 512:516].view(torch.float32)[0] = 1 + 2.0**-9
    assert dequantize_pages(cache, V32)[0, 0, 0, 0].item() == 448.0


def test_pages_may_lie_apart_in_memory() -> None:
    pages = torch.randn(2, 4, 1, 576, generator=torch.Generator().manual_seed(0))
    cache = quantize_pages(pages, V32)
    apart = torch.zeros(2, 5, 1, 656, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :4]
    apart.view(torch.uint8).copy_(cache.view(torch.uint8))
    slots = torch.tensor([7, 0, 4])
    assert torch.equal(read_slots(apart, V32, slots), read_slots(cache, V32, slots))
