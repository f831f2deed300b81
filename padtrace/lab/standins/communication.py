"""Collectives SGLang registers for CUDA only, on gloo, and the copy kernel around them."""

from typing import Any

import torch
import torch.distributed

from padtrace.lab.standins.targets import first_present, replace


def install() -> None:
    """Register `reg_all_gather_into_tensor` and `reg_reduce_scatter_tensor` for CPU tensors."""
    # For speed only: interpreted, this one kernel takes a third of a decode step.
    replace(first_present("sglang.srt.layers.dp_attention"), "memcpy_triton", memcpy_rows)
    state = first_present("sglang.srt.distributed.parallel_state")

    def group(name: str) -> Any:
        return state._groups[name]()

    def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
        torch.distributed.all_gather_into_tensor(
            output, input, group=group(group_name).device_group
        )

    def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
        members = group(group_name)
        total = input.clone()
        # gloo has no reduce-scatter: reduce everything, keep this rank's share.
        torch.distributed.all_reduce(total, group=members.device_group)
        output.copy_(total.view(members.world_size, *output.shape)[members.rank_in_group])

    torch.library.impl("sglang::reg_all_gather_into_tensor", "CPU")(all_gather_into_tensor)
    torch.library.impl("sglang::reg_reduce_scatter_tensor", "CPU")(reduce_scatter_tensor)


def memcpy_rows(
    dst: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    sz: torch.Tensor,
    offset_src: bool,
) -> None:
    """Copy `sz` rows between a rank's tokens and its place in the gathered buffer.

    offset, sz: one integer each, in rows; offset counts in src if `offset_src`, else in dst. Never
    more rows than the smaller tensor has, as the grid of `memcpy_triton` is sized by it.
    """
    start = int(offset)
    rows = min(int(sz), src.shape[0], dst.shape[0])
    if offset_src:
        dst[:rows] = src[start : start + rows]
    else:
        dst[start : start + rows] = src[:rows]
