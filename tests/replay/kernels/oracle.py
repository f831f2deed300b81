"""Softmax attention written out once more, knowing nothing of splits, parts or blocks."""

from __future__ import annotations

import torch


def plain_attention(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One q token.

    Args:
        q: (h, d).
        keys: (n, d), the first 512 values are the value.
        valid: (n,), bool.
        scale: before the softmax.

    Returns:
        (h, 512) and (h,), float64; zeros and +inf where nothing is valid.
    """
    heads = q.shape[0]
    if not bool(valid.any()):
        return (
            torch.zeros(heads, 512, dtype=torch.float64),
            torch.full((heads,), torch.inf, dtype=torch.float64),
        )
    chosen = keys[valid].double()
    logits = q.double() @ chosen.T * scale
    largest = logits.amax(dim=1, keepdim=True)
    weights = (logits - largest).exp()
    total = weights.sum(dim=1, keepdim=True)
    return weights @ chosen[:, :512] / total, (total.log() + largest)[:, 0]
