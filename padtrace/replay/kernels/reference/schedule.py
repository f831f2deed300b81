"""The split-KV schedule of the metadata kernel, integer for integer.

Source: sgl-project/FlashMLA, branch ``sgl`` (abb5477),
``csrc/smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu`` (sparse and dense bf16) and
``csrc/extension/sm90/dense_fp8/flash_fwd_mla_metadata.cu`` (dense FP8); number of parts from
``csrc/python_api.cpp`` and ``csrc/api/{sparse,dense}_decode.h``. Branch ``rebase`` (df022eb) is the
same. The wheels that came later (sglang-kernel 0.4.7, sgl-flash-mla 1.0 legacy) have no public
source; the schedule is taken to be unchanged there until a GPU run says otherwise.

How it works: every row costs its 64-token blocks plus a fixed overhead of 5. The total, divided
over the SM parts and with one more overhead added, is what a part can take. Parts are filled in
order; a row that does not fit is cut, and each piece of a cut row is one partial result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from padtrace.replay.kernels.interface import Plan
from padtrace.replay.kernels.reference.gpu import GpuModel
from padtrace.replay.kernels.reference.words import KernelExitsError

BLOCK_SIZE = 64
FIXED_OVERHEAD_NUM_BLOCKS = 5
METADATA_WIDTH = 8
# A block may opt in to 227 KiB of shared memory on SM90 and SM100; above that the fork falls back
# to a kernel that keeps nothing in it.
_MAX_SHARED_MEMORY = 227 * 1024


class SchedRow(NamedTuple):
    """One SM part's share (``struct DecodingSchedMeta``, csrc/params.h).

    Requests ``begin_req_idx .. end_req_idx`` (both included), from block ``begin_block_idx`` of
    the first to before block ``end_block_idx`` of the last. The eighth integer of the real row is
    padding that the kernel never writes; here it is 0.
    """

    begin_req_idx: int
    end_req_idx: int
    begin_block_idx: int
    end_block_idx: int
    begin_split_idx: int
    is_first_req_splitted: int
    is_last_req_splitted: int


class DenseFp8Row(NamedTuple):
    """One SM part's share in the dense FP8 kernel: five integers of eight, ends in tokens."""

    begin_idx: int
    begin_seqlen: int
    end_idx: int
    end_seqlen: int
    begin_n_split_idx: int


@dataclass(frozen=True)
class SplitSchedule:
    """The schedule of one batch.

    Attributes:
        rows: one per SM part.
        num_splits: b + 1 integers; the running count of partial results.
    """

    rows: tuple[SchedRow, ...] | tuple[DenseFp8Row, ...]
    num_splits: tuple[int, ...]

    def plan(self, device: torch.device | str = "cpu") -> Plan:
        """The two int32 tensors that travel between the calls."""
        table = torch.zeros((len(self.rows), METADATA_WIDTH), dtype=torch.int32)
        if self.rows:
            written = torch.tensor([list(row) for row in self.rows], dtype=torch.int32)
            table[:, : written.shape[1]] = written
        splits = torch.tensor(self.num_splits, dtype=torch.int32)
        return Plan(table.to(device), splits.to(device))


@dataclass
class _Cursor:
    """Where the filling of parts stands."""

    request: int = 0
    block: int = 0
    split: int = 0
    splits_done: int = 0


def _fill_part(
    cursor: _Cursor, blocks: Sequence[int], payload: int, overhead: int, num_splits: list[int]
) -> None:
    """Give one part as many blocks as ``payload`` pays for, advancing ``cursor``."""
    while cursor.request < len(blocks):
        rest = blocks[cursor.request] - cursor.block
        if payload >= rest + overhead:
            cursor.splits_done += cursor.split + 1
            num_splits[cursor.request + 1] = cursor.splits_done
            payload -= rest + overhead
            cursor.request, cursor.block, cursor.split = cursor.request + 1, 0, 0
            continue
        if payload > overhead:
            cursor.block += payload - overhead
            cursor.split += 1
        return


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def tile_schedule(
    seq_lens: Sequence[int],
    num_sm_parts: int,
    *,
    block_size: int = BLOCK_SIZE,
    fixed_overhead_num_blocks: int = FIXED_OVERHEAD_NUM_BLOCKS,
) -> SplitSchedule:
    """Schedule of the sparse and the dense bf16 decode.

    Args:
        seq_lens: tokens per row; for a sparse call what :func:`sparse_lengths` gives.
        num_sm_parts: at least 1.
        block_size: tokens per block.
        fixed_overhead_num_blocks: cost of taking a row at all, in blocks.

    Returns:
        ``num_sm_parts`` rows of :class:`SchedRow` and len(seq_lens) + 1 splits.
    """
    batch = len(seq_lens)
    last_block = [max(length - 1, 0) // block_size for length in seq_lens]
    # A row without tokens still counts as one block; it is taken back at the row's end below.
    blocks = [last + 1 for last in last_block]
    total = sum(blocks) + batch * fixed_overhead_num_blocks
    payload = _ceil_div(total, num_sm_parts) + fixed_overhead_num_blocks
    # Past the last row the kernel reads one element beyond its array of first blocks, which is
    # the first element of the array of last blocks. The fallback kernel has no such array.
    in_shared_memory = 4 * (5 * batch + 1) <= _MAX_SHARED_MEMORY
    begin_block_of_empty_part = last_block[0] if batch and in_shared_memory else 0

    cursor = _Cursor()
    num_splits = [0] * (batch + 1)
    rows: list[SchedRow] = []
    for _ in range(num_sm_parts):
        begin = (cursor.request, cursor.block, cursor.split)
        _fill_part(cursor, blocks, payload, fixed_overhead_num_blocks, num_splits)
        end_req = cursor.request if cursor.block > 0 else cursor.request - 1
        if cursor.block > 0:
            end_block = cursor.block
        else:
            end_block = 0 if seq_lens[end_req] == 0 else last_block[end_req] + 1
        last_cut = end_block != last_block[end_req] + 1 and seq_lens[end_req] != 0
        first_cut = begin[1] != 0
        if begin[0] == end_req:
            first_cut = last_cut = first_cut or last_cut
        begin_block = begin[1] if begin[0] < batch else begin_block_of_empty_part
        rows.append(
            SchedRow(
                begin[0], end_req, begin_block, end_block, begin[2], int(first_cut), int(last_cut)
            )
        )
    return SplitSchedule(tuple(rows), tuple(num_splits))


def dense_fp8_schedule(seq_lens: Sequence[int], num_sm_parts: int) -> SplitSchedule:
    """Schedule of the dense FP8 decode: a row without tokens costs no block, ends are tokens."""
    blocks = [_ceil_div(length, BLOCK_SIZE) for length in seq_lens]
    num_splits = [0] * (len(seq_lens) + 1)
    if num_sm_parts < 1:
        return SplitSchedule((), tuple(num_splits))
    total = sum(blocks) + len(seq_lens) * FIXED_OVERHEAD_NUM_BLOCKS
    payload = _ceil_div(total, num_sm_parts) + FIXED_OVERHEAD_NUM_BLOCKS
    cursor = _Cursor()
    rows: list[DenseFp8Row] = []
    for _ in range(num_sm_parts):
        begin = (cursor.request, cursor.block * BLOCK_SIZE, cursor.split)
        _fill_part(cursor, blocks, payload, FIXED_OVERHEAD_NUM_BLOCKS, num_splits)
        if cursor.block > 0:
            end = (cursor.request, cursor.block * BLOCK_SIZE)
        else:
            end = (cursor.request - 1, seq_lens[cursor.request - 1])
        rows.append(DenseFp8Row(begin[0], begin[1], end[0], end[1], begin[2]))
    return SplitSchedule(tuple(rows), tuple(num_splits))


def sparse_lengths(
    batch: int,
    topk: int,
    *,
    extra_topk: int = 0,
    topk_length: Sequence[int] | None = None,
    extra_topk_length: Sequence[int] | None = None,
) -> list[int]:
    """Tokens per row as the metadata kernel counts them for a sparse call.

    A row with nothing to attend to counts as one token. ``extra_topk`` is -1 in
    ``get_mla_decoding_metadata``, where the kernel takes any non-zero value for an extra cache, so
    that topk 2048 is planned as 2047; the number of blocks is the same.
    """
    lengths = []
    for row in range(batch):
        length = topk if topk_length is None else topk_length[row]
        length = length or 1
        if extra_topk:
            length = _ceil_div(length, BLOCK_SIZE) * BLOCK_SIZE
            length += extra_topk if extra_topk_length is None else extra_topk_length[row]
        lengths.append(length)
    return lengths


def plan_sm_parts(gpu: GpuModel, s_q: int, h_q: int, h_k: int, sparse: bool) -> int:
    """Parts that ``get_mla_decoding_metadata`` plans for (csrc/python_api.cpp)."""
    if not sparse:
        return dense_sm_parts(gpu, s_q, h_q, h_k)
    if gpu.is_sm100f:
        return max(gpu.num_sms // s_q, 1)
    return max(gpu.num_sms // s_q // max(1, h_q // 64), 1)


def dense_sm_parts(gpu: GpuModel, s_q: int, h_q: int, h_k: int) -> int:
    """Parts of a dense bf16 call (csrc/api/dense_decode.h).

    Raises:
        KernelExitsError: no head at all; the host code divides by zero there.
    """
    if h_k <= 0 or s_q * h_q // h_k == 0:
        raise KernelExitsError("integer division by zero in the host code ends the process")
    return max(gpu.num_sms // h_k // _ceil_div(s_q * h_q // h_k, 64), 1)


def dense_fp8_sm_parts(gpu: GpuModel, heads_per_head_k: int, h_k: int) -> int:
    """Parts of a dense FP8 call; not raised to 1 there.

    Raises:
        KernelExitsError: no head at all; the host code divides by zero there.
    """
    if h_k <= 0 or heads_per_head_k <= 0:
        raise KernelExitsError("integer division by zero in the host code ends the process")
    return gpu.num_sms // h_k // _ceil_div(heads_per_head_k, 64)


class SparseImplementation(NamedTuple):
    """What the sparse dispatcher picks (``DecodeImplMeta``, csrc/api/sparse_decode.h)."""

    name: str
    num_sm_parts: int
    fixed_overhead_num_blocks: int


def sparse_implementation(gpu: GpuModel, s_q: int, h_q: int, d_qk: int) -> SparseImplementation:
    """The kernel for a sparse call whose arguments passed the checks (h_q 64 or 128)."""
    if gpu.is_sm90a:
        return SparseImplementation("sm90", max(gpu.num_sms // s_q // (h_q // 64), 1), 5)
    if h_q == 64:
        return SparseImplementation("sm100-head64", max(gpu.num_sms // s_q, 1), 5)
    if d_qk == 576:
        return SparseImplementation("sm100-head64x2", max(gpu.num_sms // s_q, 1), 5)
    return SparseImplementation("sm100-head128", max(gpu.num_sms // s_q // 2, 1), 3)
