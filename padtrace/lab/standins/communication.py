"""CPU implementations (gloo) of the collectives SGLang registers as custom ops for CUDA only."""

from typing import Any

import torch
import torch.distributed

from padtrace.lab.standins.targets import first_present


def install() -> None:
    """Register `reg_all_gather_into_tensor` and `reg_reduce_scatter_tensor` for CPU tensors."""
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
