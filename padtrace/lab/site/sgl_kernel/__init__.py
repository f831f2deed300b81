"""CPU stand-in for `sgl_kernel`: the few kernels a lab server calls, in torch.

SGLang imports dozens of names from this package that a lab server never calls. Each of those is a
function that raises with its own name, so that a call is an error and never a silent result.
"""

from collections.abc import Callable

from sgl_kernel.speculative import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]
__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def no_stand_in(*args: object, **options: object) -> None:
        raise RuntimeError(f"sgl_kernel.{name} has no stand-in in padtrace's lab")

    no_stand_in.__name__ = name
    return no_stand_in
