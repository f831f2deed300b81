"""Asks a FlashMLA implementation whether it takes a replayed launch."""

from __future__ import annotations

import atexit
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import torch

from padtrace.errors import EnvironmentMissingError
from padtrace.recording.model import Value
from padtrace.replay.kernels.interface import FlashMlaKernel
from padtrace.replay.kernels.kernel_process import KernelProcess
from padtrace.replay.kernels.launch import LaunchResult, run_launch
from padtrace.replay.kernels.launch_shapes import LaunchLimits, LaunchShapes
from padtrace.replay.kernels.select import select
from padtrace.replay.worker.device import built_with_cuda

# Shapes and the schedule alone: a replay holds no values worth attending to.
_SHAPES_ONLY = LaunchLimits(max_work=0)
_INDEX_TOPK = 2048
_MAX_LISTED = 20


class RealKernels:
    """The kernel processes of this worker, which stay for its next recordings."""

    def __init__(self) -> None:
        self._started: dict[str, KernelProcess] = {}
        self._missing: dict[str, EnvironmentMissingError] = {}

    def get(self, version: str) -> KernelProcess:
        """The process with the real kernels that a release calls.

        Raises:
            EnvironmentMissingError: they cannot be called here; says why.
        """
        if version in self._missing:
            raise self._missing[version]
        if version not in self._started:
            try:
                self._started[version] = KernelProcess("cuda", version)
            except EnvironmentMissingError as missing:
                self._missing[version] = missing
                raise
        self._started[version].begin()
        return self._started[version]

    def close(self) -> None:
        """End them."""
        while self._started:
            self._started.popitem()[1].close()


_real_kernels = RealKernels()
atexit.register(_real_kernels.close)


class LaunchJudge:
    """One FlashMLA implementation; equal launches are asked once.

    The real kernels are called in a process of their own, since this one sees no GPU.

    Args:
        kernels: "off", "auto", "reference" or "cuda".
        version: release whose kernels are called, or whose words the reference uses.
        real: where the kernel process comes from.

    Raises:
        UsageError: no such `kernels`.
        EnvironmentMissingError: "cuda", and no kernel can be called here.
    """

    def __init__(self, kernels: str, version: str, real: RealKernels = _real_kernels) -> None:
        self._kernels = kernels
        self._version = version
        self._real = real
        self._kernel: KernelProcess | FlashMlaKernel | None = None
        self._why = ""
        self._seen: dict[bytes, LaunchResult] = {}
        self._outcomes: Counter[str] = Counter()
        self._without_answer: dict[str, None] = {}
        if kernels == "cuda":
            self._kernel = real.get(version)
        elif kernels != "auto":
            self._kernel = select(kernels, sglang_version=version)

    def judge(self, values: dict[str, Value]) -> LaunchResult | None:
        """What came of the launch; None where kernels are off or q's shape is not known.

        A launch that ended the kernel process is told as refused: it ends a server just so.
        """
        shape = values.get("q.shape")
        if self._kernels == "off" or not isinstance(shape, list) or len(shape) != 4:
            return None
        launch = _shapes([int(size) for size in shape], values)
        key = msgspec.msgpack.encode(launch)
        result = self._seen.get(key)
        if result is None:
            result = self._seen[key] = self._ask(launch)
        self._outcomes[result.outcome] += 1
        if result.outcome in ("ended", "interrupted", "not-called") and result.error:
            self._without_answer[result.error] = None
        return replace(result, outcome="refused") if result.outcome == "ended" else result

    def summary(self) -> dict[str, Any]:
        """What answered, for the coverage of the replay.

        `asked` is the option; `name` the implementation, None where no launch was asked; `why`
        says why "auto" took no real kernel; `outcomes` counts launches; `without_answer` lists
        the texts of those that got none.
        """
        return {
            "asked": self._kernels,
            "name": None if self._kernel is None else self._kernel.name,
            "why": self._why,
            "outcomes": dict(self._outcomes),
            "without_answer": list(self._without_answer)[:_MAX_LISTED],
        }

    def _ask(self, launch: LaunchShapes) -> LaunchResult:
        if self._kernel is None:
            self._kernel = self._real_or_reference()
        if isinstance(self._kernel, KernelProcess):
            return self._kernel.run(launch, limits=_SHAPES_ONLY)
        return run_launch(self._kernel, launch, limits=_SHAPES_ONLY)

    def _real_or_reference(self) -> KernelProcess | FlashMlaKernel:
        # A torch without CUDA needs no process to be told from one with it.
        if not built_with_cuda(torch):
            self._why = f"torch {torch.__version__} is built without CUDA"
        else:
            try:
                return self._real.get(self._version)
            except EnvironmentMissingError as missing:
                self._why = missing.why or missing.what
        reference = select("reference", sglang_version=self._version)
        assert reference is not None
        return reference


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
