"""Wrong sparse calls, one wrong thing each, for kernel and reference to be asked alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from padtrace.replay.kernels.interface import DecodeRequest, FlashMlaKernel, Plan
from padtrace.replay.kernels.launch_shapes import LaunchShapes
from padtrace.replay.kernels.reference.kernel import ReferenceKernel
from padtrace.replay.kernels.reference.schedule import sparse_implementation, sparse_lengths
from padtrace.replay.kernels.reference.schedule import tile_schedule as tiles
from padtrace.replay.kernels.tensors import build_request

_ROWS, _TOPK = 3, 128


@dataclass(frozen=True)
class Refusal:
    """One wrong call.

    Attributes:
        name: what is wrong.
        spoil: makes the good call wrong.
    """

    name: str
    spoil: Callable[[DecodeRequest], DecodeRequest]

    def build(self, kernel: FlashMlaKernel, reference: ReferenceKernel) -> DecodeRequest:
        """The wrong call on the kernel's device, planned for the reference's card."""
        return self.spoil(good_call(kernel.device, reference))


def good_call(device: torch.device, reference: ReferenceKernel) -> DecodeRequest:
    """A sparse call of 3 rows, 64 heads, top-k 128 that nothing is wrong with."""
    launch = LaunchShapes((_ROWS, 1, 64, 576), indices_shape=(_ROWS, 1, _TOPK))
    chosen = sparse_implementation(reference.gpu, 1, 64, 576)
    schedule = tiles(sparse_lengths(_ROWS, _TOPK), chosen.num_sm_parts)
    return build_request(launch, schedule.plan(device), device, seed=1, values=True)


def _longer(request: DecodeRequest) -> DecodeRequest:
    assert request.num_splits is not None
    more = torch.cat([request.num_splits, request.num_splits[-1:]])
    return replace(request, num_splits=more)


def _shorter(request: DecodeRequest) -> DecodeRequest:
    assert request.num_splits is not None
    return replace(request, num_splits=request.num_splits[:-1].clone())


def _fewer_parts(request: DecodeRequest) -> DecodeRequest:
    assert request.tile_scheduler_metadata is not None
    return replace(request, tile_scheduler_metadata=request.tile_scheduler_metadata[1:].clone())


def _both_schedules_wrong(request: DecodeRequest) -> DecodeRequest:
    return _fewer_parts(_longer(request))


def _heads(count: int) -> Callable[[DecodeRequest], DecodeRequest]:
    def spoil(request: DecodeRequest) -> DecodeRequest:
        return replace(request, q=request.q[:, :, :1].expand(-1, -1, count, -1).contiguous())

    return spoil


def _indices(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., DecodeRequest]:
    def spoil(request: DecodeRequest) -> DecodeRequest:
        assert request.indices is not None
        return replace(request, indices=change(request.indices))

    return spoil


REFUSALS = (
    Refusal("nothing", lambda call: call),
    Refusal("num_splits one too long", _longer),
    Refusal("num_splits one too short", _shorter),
    Refusal("one SM part too few", _fewer_parts),
    Refusal("parts and num_splits both wrong", _both_schedules_wrong),
    Refusal("q in float32", lambda call: replace(call, q=call.q.float())),
    Refusal("q in float16", lambda call: replace(call, q=call.q.half())),
    Refusal("q with three dimensions", lambda call: replace(call, q=call.q[:, 0])),
    Refusal("16 heads, not padded", _heads(16)),
    Refusal("96 heads", _heads(96)),
    Refusal("head size 448", lambda call: replace(call, q=call.q[..., :448].contiguous())),
    Refusal("head_dim_v 576", lambda call: replace(call, head_dim_v=576)),
    Refusal(
        "cache not quantised",
        lambda call: replace(call, k_cache=torch.zeros_like(call.k_cache, dtype=torch.bfloat16)),
    ),
    Refusal(
        "cache of 584 bytes per token",
        lambda call: replace(call, k_cache=call.k_cache[..., :584].contiguous()),
    ),
    Refusal(
        "cache cut from wider pages", lambda call: replace(call, k_cache=_from_wider(call.k_cache))
    ),
    Refusal("indices in int64", _indices(lambda indices: indices.long())),
    Refusal("indices without s_q", _indices(lambda indices: indices[:, 0])),
    Refusal("indices of fewer rows", _indices(lambda indices: indices[:-1])),
    Refusal("top-k 100", _indices(lambda indices: indices[..., :100].contiguous())),
    Refusal(
        "num_splits in int64",
        lambda call: replace(call, num_splits=_plan(call).num_splits.long()),
    ),
    Refusal("causal", lambda call: replace(call, causal=True)),
    Refusal("not an FP8 cache", lambda call: replace(call, is_fp8_kvcache=False)),
)


def _plan(call: DecodeRequest) -> Plan:
    assert call.tile_scheduler_metadata is not None
    assert call.num_splits is not None
    return Plan(call.tile_scheduler_metadata, call.num_splits)


def _from_wider(cache: torch.Tensor) -> torch.Tensor:
    raw = cache.view(torch.uint8)
    wider = torch.cat([raw, raw], dim=-1)
    return wider[..., : raw.shape[-1]]
