"""Which tensors of which event are kept: `meta` integer metadata, `full` also q and KV.

What it does may fail; then it says so once, switches itself off and the probes go on.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from padtrace.record.device_values import layout
from padtrace.record.device_values.staging import CudaStaging, HostStaging
from padtrace.record.device_values.values_file import ValuesFile

logger = logging.getLogger("padtrace")

BATCH_FIELDS = (
    "seq_lens", "req_pool_indices", "out_cache_loc", "positions", "extend_seq_lens",
    "extend_prefix_lens", "extend_start_loc",
)  # fmt: skip
PLAN_FIELDS = (
    "cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "page_table_1", "real_page_table",
    "dsa_cache_seqlens_int32", "dsa_cu_seqlens_q", "dsa_cu_seqlens_k", "dsa_seqlens_expanded",
)  # fmt: skip
LAUNCH_FIELDS = ("cache_seqlens", "num_splits", "block_table")

_STAGING_BYTES = 32 << 20
_DTYPES = {f"torch.{name}": index for index, name in enumerate(layout.DTYPES)}
_INTEGERS = frozenset(range(layout.DTYPES.index("int64") + 1))


class Keeper:
    """Keeps values of one process.

    Attributes:
        on: False once copying has failed.
    """

    def __init__(self, file: ValuesFile, tier: str) -> None:
        self._file = file
        self._full = tier == "full"
        self._host = HostStaging()
        self._cuda: CudaStaging | None = None
        self.on = True
        # A child made by fork shares the file.
        os.register_at_fork(after_in_child=self._stop)

    def batch(self, enter_seq: int, moment: str, batch: Any) -> None:
        """The integer tensors of a ForwardBatch; `moment` is "entry." or "exit."."""
        self._take(enter_seq, moment, batch, BATCH_FIELDS)

    def plan(self, enter_seq: int, metadata: Any) -> None:
        """The integer tensors of a backend's metadata, and num_splits wherever it is kept."""
        if metadata is None:
            return
        self._take(enter_seq, "", metadata, PLAN_FIELDS)
        holder = metadata
        # The DSA backend has it one level down, newer FlashMLA two.
        for _ in range(3):
            if getattr(getattr(holder, "num_splits", None), "shape", None) is not None:
                self._take(enter_seq, "", holder, ("num_splits",))
                return
            holder = getattr(holder, "flashmla_metadata", None)

    def launch(self, enter_seq: int, given: dict[str, Any]) -> None:
        """The arguments of a kernel call by name; with tier `full` also q and what it reads."""
        if not self.on:
            return
        try:
            for name in LAUNCH_FIELDS:
                self._put(enter_seq, name, given.get(name))
            if self._full:
                self._put(enter_seq, "q", given.get("q"), any_type=True)
                self._put(enter_seq, "indices", given.get("indices"))
                self._touched(enter_seq, given)
        except Exception as error:
            self._fail(error)

    def finish(self) -> None:
        """Write what is still on its way; when the process ends."""
        if not self.on:
            return
        try:
            if self._cuda is not None:
                self._cuda.finish()
        except Exception as error:
            self._fail(error)

    def _take(self, enter_seq: int, moment: str, holder: Any, names: tuple[str, ...]) -> None:
        if not self.on:
            return
        try:
            for name in names:
                self._put(enter_seq, moment + name, getattr(holder, name, None))
            if self._cuda is not None:
                self._cuda.collect()
        except Exception as error:
            self._fail(error)

    def _touched(self, enter_seq: int, given: dict[str, Any]) -> None:
        """The KV a call reads: a row for each index, or a page for each entry of the table.

        The shapes follow from the arguments' shapes, so that nothing waits for the device.
        """
        cache, indices = given.get("k_cache"), given.get("indices")
        chosen = given.get("block_table") if indices is None else indices
        if cache is None or chosen is None:
            return
        # A gather made while a stream is captured would become part of the graph.
        capturing = cache.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or not cache.is_contiguous():
            self._file.drop()
            return
        name, pages = "kv_pages", cache.view(cache.shape[0], -1)
        if indices is not None:
            name = "kv_rows"
            pages = pages.view(-1, cache.shape[-1])
        wanted = chosen.numel() * pages.shape[-1] * cache.element_size()
        if wanted > self._file.largest:
            self._file.drop()
            return
        # Gathered as bytes: not every type can be indexed on every device.
        raw = pages.view(torch.uint8)
        # Absent entries are -1; they take page 0, whose place in the table says so.
        rows = raw.index_select(0, chosen.reshape(-1).clamp(min=0).long())
        self._put(enter_seq, name, rows, any_type=True)

    def _put(self, enter_seq: int, name: str, tensor: Any, *, any_type: bool = False) -> None:
        dtype = _DTYPES.get(str(getattr(tensor, "dtype", "")))
        if dtype is None or not (any_type or dtype in _INTEGERS):
            return
        if tensor.dim() > layout.MAX_DIMENSIONS or (
            tensor.numel() * tensor.element_size() > self._file.largest
        ):
            self._file.drop()
            return
        shape = tuple(tensor.shape)

        def deliver(data: memoryview) -> None:
            self._file.put(enter_seq, name, dtype, shape, data)

        if not self._staging(tensor).stage(tensor, deliver):
            self._file.drop()

    def _staging(self, tensor: Any) -> HostStaging | CudaStaging:
        if not tensor.is_cuda:
            return self._host
        if self._cuda is None:
            self._cuda = CudaStaging(_STAGING_BYTES)
        return self._cuda

    def _stop(self) -> None:
        self.on = False

    def _fail(self, error: Exception) -> None:
        self.on = False
        try:
            self._file.failed()
            logger.warning(
                "padtrace: values are no longer kept: %s: %s", type(error).__name__, error
            )
        except Exception:
            # Even a log handler may fail; the server goes on.
            return
