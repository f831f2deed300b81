"""Blockwise fp8 quantisation in torch, for the stand-ins of the kernels that quantise."""

import torch

_LARGEST_E4M3 = 448.0


def quantize_blocks(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension in blocks of `block` values.

    values: [..., n] of any float dtype, n a multiple of block. Returns float8_e4m3fn [..., n] and
    float32 scales [..., n / block].
    """
    blocks = values.reshape(*values.shape[:-1], -1, block).float()
    scales = (blocks.abs().amax(-1) / _LARGEST_E4M3).clamp(min=1e-10)
    quantized = (blocks / scales[..., None]).to(torch.float8_e4m3fn)
    return quantized.reshape(values.shape), scales
