"""The kernel that expands sequence lengths to one KV length per query token."""

import torch

from padtrace.lab.standins.targets import first_present, module_if_present, replace

_DEFINED_IN = (
    "sglang.kernels.ops.attention.pad",
    "sglang.srt.layers.attention.triton_ops.pad",
    "sglang.srt.layers.attention.utils",
)
# `from ... import seqlens_expand_triton` copies the name into these.
_IMPORTED_INTO = (
    "sglang.srt.layers.attention.dsa_backend",
    "sglang.srt.layers.attention.dsa.dsa_backend_mtp_precompute",
)


def install() -> None:
    """Stand in for `seqlens_expand_triton`, whose wrapper asserts CUDA tensors."""
    replace(first_present(*_DEFINED_IN), "seqlens_expand_triton", seqlens_expand)
    importers = [module_if_present(name) for name in _IMPORTED_INTO]
    if importers[0] is None:  # releases before the rename; the old names warn in later ones
        importers = [module_if_present("sglang.srt.layers.attention.nsa_backend")]
    for module in importers:
        if module is not None:
            replace(module, "seqlens_expand_triton", seqlens_expand)


def seqlens_expand(
    extend_seq_lens: torch.Tensor, seq_lens: torch.Tensor, total_len: int, max_q_len: int
) -> torch.Tensor:
    """KV length seen by each query token: the last `extend` values up to `seq_len`, per request.

    extend_seq_lens, seq_lens: [bs] integers; total_len: sum of extend_seq_lens. Returns int32
    [total_len]. max_q_len only sizes the grid of the kernel.
    """
    expanded = torch.empty(total_len, dtype=torch.int32)
    start = 0
    for extend, length in zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True):
        lengths = torch.arange(length - extend + 1, length + 1, dtype=torch.int32)
        expanded[start : start + extend] = lengths.clamp(min=0)
        start += extend
    return expanded
