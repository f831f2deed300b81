"""Whether CUDA works here, in one line."""

from __future__ import annotations

import torch


def cuda_reason() -> str:
    """Why CUDA cannot be used; empty where it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""
