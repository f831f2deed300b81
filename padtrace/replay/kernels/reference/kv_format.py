"""The FP8 pages: how a token's 576 or 512 values lie in its bytes, written and read back.

Sources: the layout comments of ``flash_mla_interface.py`` and ``tests/quant.py``
(sgl-project/FlashMLA branch ``sgl``), ``csrc/api/sparse_decode.h`` for bytes per token, and for the
rounding on reading ``csrc/sm90/decode/sparse_fp8/{splitkv_mla.cuh,components/dequant.h}``: the
value and its scale are both rounded to bfloat16 and multiplied in bfloat16.

V32 (656 bytes, token by token): 512 float8_e4m3, 4 float32 scales (one per 128 values), 64
bfloat16 of RoPE. V32_NO_ROPE (528 bytes) is the same without the RoPE part.
V4 (584 bytes, called MODEL1 in the public source): per page first every token's 448 float8_e4m3
and 64 bfloat16, then every token's 7 float8_e8m0 scales (one per 64 values) and one unused byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FP8_MAX = 448.0
_SMALLEST_SCALE = 1e-4


@dataclass(frozen=True)
class KvFormat:
    """One layout.

    Attributes:
        name: FlashMLA's name of it.
        d_qk: values per token.
        d_nope: quantised values per token, the first ones.
        d_rope: bfloat16 values per token, the last ones.
        tile: values that share a scale.
        scale_bytes: bytes of scales per token, unused ones included.
        split_page: True where the scales of a page follow all of its values.
    """

    name: str
    d_qk: int
    d_nope: int
    d_rope: int
    tile: int
    scale_bytes: int
    split_page: bool

    @property
    def bytes_per_token(self) -> int:
        """The last dimension of the cache tensor."""
        return self.d_nope + 2 * self.d_rope + self.scale_bytes

    @property
    def tiles(self) -> int:
        """Scales per token."""
        return self.d_nope // self.tile


V32 = KvFormat("V32", 576, 512, 64, 128, 16, False)
V32_NO_ROPE = KvFormat("V32_NO_ROPE", 512, 512, 0, 128, 16, False)
V4 = KvFormat("V4", 512, 448, 64, 64, 8, True)
FORMATS = (V32, V32_NO_ROPE, V4)


def quantize_pages(pages: torch.Tensor, kv_format: KvFormat = V32) -> torch.Tensor:
    """Write pages.

    Args:
        pages: (num_blocks, page_block_size, 1, d_qk), any floating dtype.
        kv_format: layout to write.

    Returns:
        (num_blocks, page_block_size, 1, bytes_per_token), float8_e4m3fn. Scales are powers of
        two, as FlashMLA's own tests write them, so that reading back rounds nothing further.
    """
    blocks, page, _, _ = pages.shape
    values = pages.reshape(blocks, page, kv_format.d_qk).float()
    tiled = values[..., : kv_format.d_nope].reshape(blocks, page, kv_format.tiles, kv_format.tile)
    largest = tiled.abs().amax(dim=-1) / _FP8_MAX
    scales = torch.exp2(torch.clamp_min(largest, _SMALLEST_SCALE).log2().ceil())
    nope = (tiled / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    nope_bytes = nope.reshape(blocks, page, -1).view(torch.uint8)
    rope_bytes = values[..., kv_format.d_nope :].to(torch.bfloat16).contiguous().view(torch.uint8)
    if kv_format.split_page:
        scale_bytes = torch.zeros((blocks, page, kv_format.scale_bytes), dtype=torch.uint8)
        scale_bytes = scale_bytes.to(pages.device)
        scale_bytes[..., : kv_format.tiles] = scales.to(torch.float8_e8m0fnu).view(torch.uint8)
        data = torch.cat([nope_bytes, rope_bytes], dim=-1).reshape(blocks, -1)
        flat = torch.cat([data, scale_bytes.reshape(blocks, -1)], dim=-1)
    else:
        flat = torch.cat([nope_bytes, scales.contiguous().view(torch.uint8), rope_bytes], dim=-1)
    shaped = flat.reshape(blocks, page, 1, kv_format.bytes_per_token)
    return shaped.contiguous().view(torch.float8_e4m3fn)


def read_slots(cache: torch.Tensor, kv_format: KvFormat, slots: torch.Tensor) -> torch.Tensor:
    """Read tokens back as the kernels see them.

    Args:
        cache: (num_blocks, page_block_size, 1, bytes_per_token), a one-byte dtype, pages
            contiguous in themselves.
        kv_format: its layout.
        slots: (n,), int64, each in 0 .. num_blocks * page_block_size - 1.

    Returns:
        (n, d_qk), bfloat16.
    """
    blocks, page = cache.shape[0], cache.shape[1]
    raw = torch.as_strided(
        cache.view(torch.uint8),
        (blocks, page * kv_format.bytes_per_token),
        (cache.stride(0), 1),
    )
    block, offset = slots // page, slots % page
    value_bytes = kv_format.d_nope + 2 * kv_format.d_rope
    if kv_format.split_page:
        data = _pick(raw, block, offset * value_bytes, value_bytes)
        scale_bytes = _pick(
            raw, block, page * value_bytes + offset * kv_format.scale_bytes, kv_format.scale_bytes
        )
        scales = scale_bytes[:, : kv_format.tiles].contiguous().view(torch.float8_e8m0fnu)
        nope_bytes, rope_bytes = data[:, : kv_format.d_nope], data[:, kv_format.d_nope :]
    else:
        token = _pick(raw, block, offset * kv_format.bytes_per_token, kv_format.bytes_per_token)
        nope_bytes = token[:, : kv_format.d_nope]
        after = kv_format.d_nope + kv_format.scale_bytes
        scales = token[:, kv_format.d_nope : after].contiguous().view(torch.float32)
        rope_bytes = token[:, after:]
    nope = nope_bytes.contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)
    tiled = nope.reshape(-1, kv_format.tiles, kv_format.tile)
    scaled = (tiled * scales.to(torch.bfloat16).unsqueeze(-1)).reshape(-1, kv_format.d_nope)
    if not kv_format.d_rope:
        return scaled
    rope = rope_bytes.contiguous().view(torch.bfloat16)
    return torch.cat([scaled, rope], dim=-1)


def _pick(raw: torch.Tensor, block: torch.Tensor, start: torch.Tensor, width: int) -> torch.Tensor:
    """``width`` bytes from ``start`` of each block, (n, width), uint8."""
    columns = start.unsqueeze(-1) + torch.arange(width, device=raw.device)
    return raw[block.unsqueeze(-1), columns]


def dequantize_pages(cache: torch.Tensor, kv_format: KvFormat = V32) -> torch.Tensor:
    """Read whole pages back: (num_blocks, page_block_size, 1, d_qk), bfloat16."""
    blocks, page = cache.shape[0], cache.shape[1]
    slots = torch.arange(blocks * page, device=cache.device)
    return read_slots(cache, kv_format, slots).reshape(blocks, page, 1, kv_format.d_qk)
