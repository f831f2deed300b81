"""Device queries that SGLang makes without asking whether there is a device."""

from collections.abc import Callable
from typing import Any

import torch

from padtrace.lab.standins.targets import replace


class _NoStream:
    """What `torch.cuda.current_stream()` gives here: nothing to order, so nothing to wait for."""

    cuda_stream = 0

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


def install() -> None:
    """Drop pinned memory and answer the CUDA queries as a Hopper GPU without work would."""
    replace(torch, "tensor", _without_pinning(torch.tensor))
    # server_args and the DSA backend read the capability on any device; 9.0 is the architecture
    # whose FlashMLA path the lab stands in for.
    replace(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    # set_embed_and_head of the NextN draft model calls both on any device.
    replace(torch.cuda, "synchronize", lambda device=None: None)
    replace(torch.cuda, "empty_cache", lambda: None)
    # The context-parallel gathers pass the current stream along as an argument.
    stream = _NoStream()
    replace(torch.cuda, "current_stream", lambda device=None: stream)


def _without_pinning(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return original(*args, **options)  # pinning raises where there is no accelerator

    return tensor
