"""Argument tensors of a recorded launch: seeded values, or shapes without memory behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from padtrace.errors import BadRecordingError
from padtrace.replay.kernels.interface import DecodeRequest, Plan
from padtrace.replay.kernels.launch_shapes import LaunchShapes
from padtrace.replay.kernels.reference.kv_format import V4, V32, quantize_pages

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
_MOST_BYTES = 1 << 44
# Pages of a random cache: enough that top-k lists differ, few enough to stay small.
_RANDOM_PAGES = 32


def check_size(launch: LaunchShapes) -> int:
    """Bytes of the argument tensors, were all of them built with values.

    Raises:
        BadRecordingError: more than any machine holds.
    """
    size = (
        math.prod(launch.q_shape) * _ITEM_BYTES.get(launch.q_dtype, 1)
        + math.prod(launch.indices_shape or (0,)) * 4
        + math.prod(launch.block_table_shape or (0,)) * 4
        + math.prod(_cache_shape(launch)) * _ITEM_BYTES.get(_cache_dtype_name(launch), 1)
    )
    if size > _MOST_BYTES:
        raise BadRecordingError(
            f"a launch event cannot be rebuilt: its arguments take {size} bytes",
            f"no launch has more than {_MOST_BYTES}",
            "the recording is damaged or was made by something else; record again",
        )
    return size


_RECORDABLE = (
    "q",
    "k_cache",
    "block_table",
    "cache_seqlens",
    "tile_scheduler_metadata",
    "num_splits",
    "indices",
    "attn_sink",
    "topk_length",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "extra_topk_length",
    "descale_q",
    "descale_k",
)


def check_recorded(recorded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Recorded argument tensors, if each is an argument of the decode call.

    Raises:
        BadRecordingError: names the tensor that is none.
    """
    for name in recorded:
        if name not in _RECORDABLE:
            raise BadRecordingError(
                f"a launch event holds a tensor {name!r}",
                "flash_mla_with_kvcache has no such tensor argument",
                "the recording is damaged or was made by something else; record again",
            )
    return recorded


def build_request(
    launch: LaunchShapes, plan: Plan | None, device: torch.device, seed: int, *, values: bool
) -> DecodeRequest:
    """The decode call of a launch.

    Args:
        launch: the recorded launch, checked.
        plan: its schedule, or None to let the call plan.
        device: where tensors live.
        seed: for random values.
        values: False gives tensors without memory behind them (torch's ``meta`` device), for
            calls that are judged by their arguments only.
    """
    source = _Random(seed, device) if values else _Hollow()
    sparse = launch.indices_shape is not None
    cache = source.cache(launch)
    descale = None
    if not sparse and launch.q_dtype == "float8_e4m3fn":
        descale = torch.ones(1, dtype=torch.float32, device=device)
    return DecodeRequest(
        q=source.floats(launch.q_shape, launch.q_dtype),
        k_cache=cache,
        block_table=source.pages(launch.block_table_shape or (launch.q_rows, 0), cache.shape[0]),
        cache_seqlens=_seqlens(launch, device),
        head_dim_v=launch.head_dim_v,
        tile_scheduler_metadata=None if plan is None else plan.tile_scheduler_metadata,
        num_splits=None if plan is None else plan.num_splits,
        softmax_scale=launch.softmax_scale,
        causal=launch.causal,
        is_fp8_kvcache=sparse if launch.is_fp8_kvcache is None else launch.is_fp8_kvcache,
        indices=source.slots(launch.indices_shape, cache) if launch.indices_shape else None,
        topk_length=_int32(launch.topk_length, device),
        descale_q=descale,
        descale_k=descale,
    )


def _int32(numbers: Sequence[int] | None, device: torch.device) -> torch.Tensor | None:
    if numbers is None:
        return None
    return torch.tensor(list(numbers), dtype=torch.int32, device=device)


def _seqlens(launch: LaunchShapes, device: torch.device) -> torch.Tensor:
    known = _int32(launch.cache_seqlens, device)
    if known is not None:
        return known
    rows = launch.q_rows if launch.cache_seqlens_rows is None else launch.cache_seqlens_rows
    return torch.ones(rows, dtype=torch.int32, device=device)


def _cache_dtype_name(launch: LaunchShapes) -> str:
    if launch.k_cache_dtype is not None:
        return launch.k_cache_dtype
    return "float8_e4m3fn" if launch.indices_shape is not None else launch.q_dtype


def _cache_shape(launch: LaunchShapes) -> tuple[int, int, int, int]:
    d_qk = launch.q_shape[-1] if launch.q_shape else 0
    width = d_qk
    if launch.indices_shape is not None:
        known = V32 if d_qk == V32.d_qk else V4
        width = launch.bytes_per_token or known.bytes_per_token
    return _RANDOM_PAGES, launch.page_size, launch.num_heads_k, width


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class _Hollow:
    """Tensors on torch's ``meta`` device: shape, strides and dtype, which is all that is judged."""

    def floats(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """A tensor without values."""
        return torch.empty(tuple(shape), dtype=_dtype(dtype), device="meta")

    def slots(self, shape: Sequence[int], cache: torch.Tensor) -> torch.Tensor:
        """Indices without values."""
        return torch.empty(tuple(shape), dtype=torch.int32, device="meta")

    def pages(self, shape: Sequence[int], pages: int) -> torch.Tensor:
        """A block table without values."""
        return torch.empty(tuple(shape), dtype=torch.int32, device="meta")

    def cache(self, launch: LaunchShapes) -> torch.Tensor:
        """A cache without values."""
        return self.floats(_cache_shape(launch), _cache_dtype_name(launch))


class _Random:
    """Seeded values."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def floats(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Normal values cut at +-1, or small integers for an integer dtype."""
        wanted = _dtype(dtype)
        values = torch.randn(tuple(shape), generator=self._generator).clamp_(-1, 1)
        return (values if wanted.is_floating_point else values * 100).to(wanted).to(self.device)

    def slots(self, shape: Sequence[int], cache: torch.Tensor) -> torch.Tensor:
        """Slots of the cache; about one in eight is -1."""
        room = max(cache.shape[0] * cache.shape[1], 1)
        size = tuple(shape)
        chosen = torch.randint(0, room, size, generator=self._generator, dtype=torch.int32)
        drop = torch.randint(0, 8, size, generator=self._generator) == 0
        return torch.where(drop, torch.tensor(-1, dtype=torch.int32), chosen).to(self.device)

    def pages(self, shape: Sequence[int], pages: int) -> torch.Tensor:
        """Page numbers of the cache."""
        chosen = torch.randint(0, max(pages, 1), tuple(shape), generator=self._generator)
        return chosen.to(torch.int32).to(self.device)

    def cache(self, launch: LaunchShapes) -> torch.Tensor:
        """A quantised cache in the launch's layout, or random values of the recorded dtype."""
        shape = _cache_shape(launch)
        dtype = _cache_dtype_name(launch)
        fitting = next(
            (one for one in (V32, V4) if launch.q_shape and one.d_qk == launch.q_shape[-1]), None
        )
        one_byte = dtype in ("float8_e4m3fn", "uint8", "int8")
        if (
            launch.indices_shape is not None
            and fitting is not None
            and one_byte
            and shape[2:] == (1, fitting.bytes_per_token)
        ):
            values = torch.randn((*shape[:3], fitting.d_qk), generator=self._generator) / 10
            quantised = quantize_pages(values.clamp_(-1, 1), fitting)
            return quantised.view(_dtype(dtype)).to(self.device)
        values = torch.randn(shape, generator=self._generator).clamp_(-1, 1)
        return values.to(_dtype(dtype)).to(self.device)
