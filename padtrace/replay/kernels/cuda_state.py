"""Whether CUDA works here, and whether it still does."""

from __future__ import annotations

import torch


def cuda_reason() -> str:
    """Why CUDA cannot be used; empty where it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""


def context_lost() -> bool:
    """Whether a call broke this process's CUDA context (an illegal access): nothing works after."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
