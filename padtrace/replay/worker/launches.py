"""Asks a FlashMLA implementation whether it takes a replayed launch."""

from __future__ import annotations

from typing import Any

from padtrace.recording.model import Value
from padtrace.replay.kernels.interface import FlashMlaKernel
from padtrace.replay.kernels.launch import LaunchResult, run_launch
from padtrace.replay.kernels.launch_shapes import LaunchLimits, LaunchShapes
from padtrace.replay.kernels.select import select

# Shapes and the schedule alone: a replay holds no values worth attending to.
_SHAPES_ONLY = LaunchLimits(max_work=0)
_INDEX_TOPK = 2048


class LaunchJudge:
    """One FlashMLA implementation; equal launches are asked once.

    Args:
        kernels: "off", "auto", "reference" or "cuda".
        version: release whose kernels' words the reference uses.

    Raises:
        EnvironmentMissingError: "cuda", and no kernel can be called here.
    """

    def __init__(self, kernels: str, version: str) -> None:
        self._kernel: FlashMlaKernel | None = select(kernels, sglang_version=version)
        self._seen: dict[tuple[Any, ...], LaunchResult] = {}

    def judge(self, values: dict[str, Value]) -> LaunchResult | None:
        """What came of the launch; None where kernels are off or q's shape is not known."""
        shape = values.get("q.shape")
        if self._kernel is None or not isinstance(shape, list) or len(shape) != 4:
            return None
        launch = _shapes([int(size) for size in shape], values)
        key = (
            tuple(launch.q_shape),
            *(launch.num_splits_rows, launch.cache_seqlens_rows, launch.q_dtype),
            *(launch.k_cache_dtype, launch.bytes_per_token, launch.page_size, launch.head_dim_v),
        )
        if key not in self._seen:
            self._seen[key] = run_launch(self._kernel, launch, limits=_SHAPES_ONLY)
        return self._seen[key]


def _shapes(query: list[int], values: dict[str, Value]) -> LaunchShapes:
    """The launch as numbers: q and the plan from the replay, the rest as recorded."""
    cache = values.get("k_cache.shape")
    indices = values.get("indices.shape")
    topk = int(indices[-1]) if isinstance(indices, list) and indices else _INDEX_TOPK
    head = values.get("head_dim_v")
    has_cache = isinstance(cache, list) and len(cache) == 4
    return LaunchShapes(
        query,
        num_splits_rows=_integer(values.get("num_splits.rows")),
        cache_seqlens_rows=_integer(values.get("cache_seqlens.rows")),
        # SGLang pads the top-k indices to q's rows, and passes an empty table beside them.
        indices_shape=[query[0], query[1], topk],
        block_table_shape=[query[0], 0],
        page_size=int(cache[1]) if has_cache else 64,  # type: ignore[index]
        bytes_per_token=int(cache[3]) if has_cache else None,  # type: ignore[index]
        head_dim_v=head if isinstance(head, int) else 512,
        q_dtype=_dtype(values.get("q.dtype")) or "bfloat16",
        k_cache_dtype=_dtype(values.get("k_cache.dtype")),
        is_fp8_kvcache=True,
    )


def _integer(value: Value | None) -> int | None:
    return value if isinstance(value, int) else None


def _dtype(value: Value | None) -> str | None:
    return value.removeprefix("torch.") if isinstance(value, str) else None
