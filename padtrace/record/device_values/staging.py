"""Copies tensors to the host without making the forward path wait for the device.

On CUDA a tensor is cloned on the stream of the forward, which keeps the moment; a side stream then
copies the clone into pinned memory, and the bytes are collected once an event says they are there.
Where the copy falls behind, tensors are dropped rather than waited for.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Deliver = Callable[[memoryview], None]

_ALIGN = 256


class Spans:
    """Spans of one block of memory, given out and taken back in the same order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: deque[tuple[int, int]] = deque()

    def reserve(self, count: int) -> int | None:
        """Where `count` bytes are free, or None."""
        count = max(count, 1)
        if not self._taken:
            start, limit = 0, self._size
        else:
            oldest, (newest, end) = self._taken[0][0], self._taken[-1]
            start, limit = -(-end // _ALIGN) * _ALIGN, oldest
            if newest >= oldest:
                # Free behind the newest and, once that is used up, before the oldest.
                limit = self._size
                if start + count > limit:
                    start, limit = 0, oldest
        if start + count > limit:
            return None
        self._taken.append((start, start + count))
        return start

    def release(self) -> int:
        """Take back the oldest span; where it was."""
        return self._taken.popleft()[0]


class HostStaging:
    """For tensors on the CPU: the bytes are there already."""

    def stage(self, tensor: torch.Tensor, deliver: Deliver) -> bool:
        """Hand the bytes of `tensor` to `deliver`, now or later; False if there is no room."""
        held = tensor.detach().contiguous()
        deliver(bytes_at(held.data_ptr(), held.numel() * held.element_size()))
        return True

    def collect(self) -> None:
        """Deliver what has arrived."""

    def finish(self) -> None:
        """Deliver all of it, waiting; only when the process ends."""


class CudaStaging:
    """For tensors on a CUDA device; see the module.

    Pinned memory is taken once, since taking it synchronises the device.
    """

    def __init__(self, size: int) -> None:
        """
        Args:
            size: bytes of pinned memory.
        """
        self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._base = self._pinned.data_ptr()
        self._spans = Spans(size)
        self._streams: dict[torch.device, Any] = {}
        # Oldest first: event, bytes, the clone (kept until it is copied), deliver.
        self._pending: deque[tuple[Any, int, torch.Tensor, Deliver]] = deque()

    def stage(self, tensor: torch.Tensor, deliver: Deliver) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return False
        count = tensor.numel() * tensor.element_size()
        start = self._spans.reserve(count)
        if start is None:
            return False
        clone = tensor.detach().contiguous().clone()
        forward = torch.cuda.current_stream(tensor.device)
        side = self._side_stream(tensor.device)
        side.wait_stream(forward)
        with torch.cuda.stream(side):
            source = clone.reshape(-1).view(torch.uint8)
            self._pinned[start : start + count].copy_(source, non_blocking=True)
            arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(side)
        # The allocator must not give the clone's memory away before the side stream has read it.
        clone.record_stream(side)
        self._pending.append((arrived, count, clone, deliver))
        return True

    def collect(self) -> None:
        while self._pending and self._pending[0][0].query():
            self._deliver_oldest()

    def finish(self) -> None:
        while self._pending:
            self._pending[0][0].synchronize()
            self._deliver_oldest()

    def _deliver_oldest(self) -> None:
        _, count, _, deliver = self._pending.popleft()
        deliver(bytes_at(self._base + self._spans.release(), count))

    def _side_stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def bytes_at(address: int, count: int) -> memoryview:
    """Memory as bytes; the caller keeps it alive while they are read."""
    if not count:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")
