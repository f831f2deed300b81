"""Partial results per SM part and their combination, in float64.

Sources: main loops of ``csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh``,
``csrc/sm100/decode/head64/kernel.cuh``, ``csrc/sm90/decode/dense/splitkv_mla.cuh`` and
``csrc/extension/sm90/dense_fp8/flash_fwd_mla_kernel.h``; combination in
``csrc/smxx/decode/combine/combine.cu`` (sgl-project/FlashMLA branch ``sgl``).

The schedule given to the call is followed to the letter, right or wrong: a piece that no part
visits stays unwritten, as the kernel's ``torch.empty`` would. Unwritten values are NaN here, and
each such thing is told as a hazard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from padtrace.replay.kernels.reference.schedule import BLOCK_SIZE

_MAX_SPLITS = (32, 64, 96, 128, 160)
_MAX_HAZARDS = 20


class Piece(NamedTuple):
    """Blocks ``start .. end - 1`` of one row, done by one SM part."""

    part: int
    row: int
    start: int
    end: int
    whole: bool
    split: int


class Keys(NamedTuple):
    """What one piece attends to.

    Attributes:
        keys: (s_q, n, d_qk) or (1, n, d_qk), float64; the first d_v values are also the values.
        valid: (s_q, n), bool.
    """

    keys: torch.Tensor
    valid: torch.Tensor


@dataclass
class Hazards:
    """Things that the kernel does not check, one line each, bounded."""

    lines: list[str] = field(default_factory=list)
    left_out: int = 0

    def add(self, line: str) -> None:
        """Note one line; beyond the bound only count."""
        if len(self.lines) < _MAX_HAZARDS:
            self.lines.append(line)
        else:
            self.left_out += 1

    def told(self) -> tuple[str, ...]:
        """All lines, with a count of those left out."""
        rest = (f"and {self.left_out} more",) if self.left_out else ()
        return (*self.lines, *rest)


def pieces(
    rows: list[list[int]], batch: int, blocks_of: Callable[[int], int], hazards: Hazards
) -> Iterator[Piece]:
    """What each part does, from the metadata tensor's rows (sparse and dense bf16)."""
    for part, row in enumerate(rows):
        begin, end, begin_block, end_block, begin_split, first_cut, last_cut = row[:7]
        if begin >= batch:
            continue
        if begin < 0 or end >= batch:
            hazards.add(f"part {part} is told to visit rows {begin}..{end} of {batch}")
        for request in range(max(begin, 0), min(end, batch - 1) + 1):
            whole = not (first_cut if request == begin else (last_cut if request == end else False))
            yield Piece(
                part,
                request,
                begin_block if request == begin else 0,
                end_block if request == end else blocks_of(request),
                bool(whole),
                begin_split if request == begin else 0,
            )


def pieces_dense_fp8(rows: list[list[int]], seq_lens: list[int]) -> Iterator[Piece]:
    """The same from the dense FP8 kernel's rows, whose ends are tokens."""
    for part, (begin, begin_token, end, end_token, begin_split) in enumerate(
        row[:5] for row in rows
    ):
        if begin >= len(seq_lens):
            continue
        for request in range(max(begin, 0), min(end, len(seq_lens) - 1) + 1):
            blocks = -(-seq_lens[request] // BLOCK_SIZE)
            start = begin_token // BLOCK_SIZE if request == begin else 0
            stop = -(-end_token // BLOCK_SIZE) if request == end else blocks
            split = begin_split if request == begin else 0
            yield Piece(part, request, start, stop, start == 0 and stop == blocks, split)


class Accumulators:
    """Output, lse and the partial results of one call, for (s_q, h) pairs of every row."""

    def __init__(self, batch: int, pairs: int, d_v: int, parts: int, device: torch.device) -> None:
        def unwritten(*shape: int) -> torch.Tensor:
            return torch.full(shape, math.nan, dtype=torch.float64, device=device)

        self.batch, self.parts, self.device = batch, parts, device
        self.shape = (pairs, d_v)
        self.out = unwritten(batch, pairs, d_v)
        self.lse = unwritten(batch, pairs)
        self.row_written = [False] * batch
        self.partial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write_whole(self, row: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """A part that did a row alone writes the result itself."""
        self.out[row], self.lse[row] = out, lse
        self.row_written[row] = True

    def write_partial(
        self, index: int, out: torch.Tensor, lse: torch.Tensor, hazards: Hazards
    ) -> None:
        """A piece of a cut row goes to the accumulation buffer."""
        room = self.batch + self.parts
        if not 0 <= index < room:
            hazards.add(
                f"a partial result is written at {index}, past the {room} there is room for"
            )
            return
        self.partial[index] = (out, lse)

    def combine(
        self, num_splits: list[int], sink: torch.Tensor | None, fp8: bool, hazards: Hazards
    ) -> None:
        """Combine each row's partial results; rows with exactly one are left as they are."""
        limit = next((size for size in _MAX_SPLITS if self.parts <= size), 0)
        for row in range(self.batch):
            count = num_splits[row + 1] - num_splits[row]
            if count == 1 or (fp8 and count <= 1):
                if not self.row_written[row]:
                    hazards.add(f"row {row}: no part writes its output; it stays uninitialised")
                continue
            if count > limit:
                hazards.add(f"row {row}: {count} splits exceed the {limit} the kernel asserts")
                self.out[row], self.lse[row] = math.nan, math.nan
                continue
            self._combine_row(row, num_splits[row], count, sink, hazards)

    def _combine_row(
        self, row: int, start: int, count: int, sink: torch.Tensor | None, hazards: Hazards
    ) -> None:
        pairs, d_v = self.shape
        if count <= 0:
            # Nothing is summed: zeros and +inf are written over whatever a part has written.
            hazards.add(f"row {row}: num_splits gives it no partial result; its output is zeroed")
            self.out[row], self.lse[row] = 0.0, math.inf
            return
        outs = torch.full((count, pairs, d_v), math.nan, dtype=torch.float64, device=self.device)
        lses = torch.full((count, pairs), math.nan, dtype=torch.float64, device=self.device)
        for offset in range(count):
            found = self.partial.get(start + offset)
            if found is None:
                hazards.add(f"row {row}: partial result {start + offset} is read but never written")
            else:
                outs[offset], lses[offset] = found
        total = torch.logsumexp(lses, dim=0)
        lonely = total == -math.inf
        total = torch.where(lonely, math.inf, total)
        self.lse[row] = total
        if sink is not None:
            with_sink = torch.logaddexp(total, sink)
            alone = torch.where(sink == -math.inf, math.inf, sink)
            total = torch.where(lonely, alone, with_sink)
        weights = torch.exp(lses - total)
        self.out[row] = (weights.unsqueeze(-1) * outs).sum(dim=0)


def attend(
    q: torch.Tensor, found: Keys, scale: float, d_v: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one piece.

    Args:
        q: (s_q, h, d_qk), float64.
        found: what the piece attends to.
        scale: factor before the softmax.
        d_v: leading values of a key that are its value.

    Returns:
        (s_q * h, d_v) normalised output and (s_q * h,) natural-log lse, float64; 0 and -inf
        where nothing is valid.
    """
    s_q, heads, _ = q.shape
    if found.valid.shape[-1] == 0:
        zeros = torch.zeros(s_q * heads, d_v, dtype=torch.float64, device=q.device)
        return zeros, torch.full_like(zeros[:, 0], -math.inf)
    logits = torch.matmul(q, found.keys.transpose(-1, -2)) * scale
    logits = torch.where(found.valid.unsqueeze(1), logits, -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    # 0 * NaN is NaN: a masked key must not reach the sum through its value.
    values = torch.where(found.valid.unsqueeze(-1), found.keys[..., :d_v], 0.0)
    safe = torch.where(lse == -math.inf, 0.0, lse)
    out = torch.matmul(torch.exp(logits - safe.unsqueeze(-1)), values)
    return out.reshape(s_q * heads, d_v), lse.reshape(-1)


def sink_factor(lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """exp(lse) / (exp(lse) + exp(sink)), by which a whole row's output is scaled.

    0 where nothing was attended to, whatever the sink.
    """
    factor = torch.exp(lse - torch.logaddexp(lse, sink))
    return torch.where(lse == -math.inf, 0.0, factor)
