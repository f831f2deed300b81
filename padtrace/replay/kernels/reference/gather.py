"""Where a piece's keys come from: listed slots of FP8 pages, or blocks of a block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padtrace.replay.kernels.interface import DecodeRequest
from padtrace.replay.kernels.reference.attention import Hazards, Keys, Piece
from padtrace.replay.kernels.reference.check_sparse import SparseCall
from padtrace.replay.kernels.reference.kv_format import KvFormat, read_slots
from padtrace.replay.kernels.reference.schedule import BLOCK_SIZE


@dataclass
class _Listed:
    """One cache with the slots to read from it, for one row of q."""

    cache: torch.Tensor
    kv_format: KvFormat
    slots: torch.Tensor
    length: int


class SparseKeys:
    """Keys of a sparse call: ``indices`` into the cache, then into the extra cache if any.

    An index of -1, or one at or past ``topk_length``, is masked and its bytes never count. Any
    other index outside the cache is not checked by the kernels: SM90 reads whatever memory lies
    there. Here such a row turns NaN and the hazard is told.
    """

    def __init__(self, request: DecodeRequest, call: SparseCall, hazards: Hazards) -> None:
        self.request, self.call, self.hazards = request, call, hazards
        lengths = request.topk_length
        self._lengths = None if lengths is None else lengths.tolist()
        extra = request.extra_topk_length
        self._extra_lengths = None if extra is None else extra.tolist()

    def _main_length(self, row: int) -> int:
        return self.call.topk if self._lengths is None else int(self._lengths[row])

    def _extra_length(self, row: int) -> int:
        if self._extra_lengths is None:
            return self.call.extra_topk
        return int(self._extra_lengths[row])

    def _main_blocks(self, row: int) -> int:
        return max(-(-self._main_length(row) // BLOCK_SIZE), 1)

    def blocks_of(self, row: int) -> int:
        """64-slot blocks of a row, those of the extra cache behind the others."""
        return self._main_blocks(row) + -(-self._extra_length(row) // BLOCK_SIZE)

    def keys(self, piece: Piece) -> Keys:
        """The keys of one piece, each q token with its own list."""
        request, border = self.request, self._main_blocks(piece.row)
        assert request.indices is not None
        found = [
            self._read(
                _Listed(
                    request.k_cache,
                    self.call.kv_format,
                    request.indices[piece.row],
                    self._main_length(piece.row),
                ),
                piece.row,
                piece.start,
                min(piece.end, border),
            )
        ]
        if request.extra_k_cache is not None and request.extra_indices_in_kvcache is not None:
            listed = _Listed(
                request.extra_k_cache,
                self.call.kv_format,
                request.extra_indices_in_kvcache[piece.row],
                self._extra_length(piece.row),
            )
            start = max(piece.start, border) - border
            found.append(self._read(listed, piece.row, start, piece.end - border))
        keys = torch.cat([one.keys for one in found], dim=1)
        return Keys(keys, torch.cat([one.valid for one in found], dim=1))

    def _read(self, listed: _Listed, row: int, start: int, end: int) -> Keys:
        slots = listed.slots[:, start * BLOCK_SIZE : max(end, start) * BLOCK_SIZE].long()
        place = torch.arange(slots.shape[1], device=slots.device) + start * BLOCK_SIZE
        valid = (slots != -1) & (place < listed.length)
        # The kernel divides the index as an unsigned 32-bit number.
        unsigned = torch.where(slots < 0, slots + 2**32, slots)
        room = listed.cache.shape[0] * listed.cache.shape[1]
        past = valid & (unsigned >= room)
        readable = torch.where(valid & ~past, unsigned, 0)
        flat = readable.reshape(-1)
        d_qk = listed.kv_format.d_qk
        if room == 0:
            read = torch.zeros(flat.shape[0], d_qk, dtype=torch.float64, device=slots.device)
        else:
            read = read_slots(listed.cache, listed.kv_format, flat).double()
        keys = read.reshape(*slots.shape, d_qk)
        if bool(past.any()):
            first = int(slots[past][0])
            self.hazards.add(
                f"row {row}: {int(past.sum())} indices lie outside the cache of {room} tokens "
                f"(first: {first}); the kernel does not check, it reads foreign memory"
            )
            keys = torch.where(past.unsqueeze(-1), float("nan"), keys)
        return Keys(keys, valid)


class DenseKeys:
    """Keys of a dense call: the row's pages in order, cut at its length and, if causal, per token.

    A page number outside the cache is not checked by the kernel (a tensor-map load of it gives
    zeros or a fault); here the row turns NaN and the hazard is told.
    """

    def __init__(self, request: DecodeRequest, causal: bool, hazards: Hazards) -> None:
        assert request.cache_seqlens is not None
        assert request.block_table is not None
        self.request, self.causal, self.hazards = request, causal, hazards
        self.table = request.block_table
        self.seq_lens = [int(length) for length in request.cache_seqlens.tolist()]

    def blocks_of(self, row: int) -> int:
        """Pages that hold tokens of the row."""
        return -(-self.seq_lens[row] // BLOCK_SIZE)

    def keys(self, piece: Piece, head: int) -> Keys:
        """The keys of one piece under one KV head."""
        s_q, cache = self.request.q.shape[1], self.request.k_cache
        device = cache.device
        end = min(piece.end, self.blocks_of(piece.row))
        numbers = list(range(piece.start, max(end, piece.start)))
        inside = [number for number in numbers if number < self.table.shape[1]]
        pages = self.table[piece.row, inside].long() if inside else torch.zeros(0, dtype=torch.long)
        bad = (pages < 0) | (pages >= cache.shape[0])
        if len(inside) < len(numbers) or bool(bad.any()):
            self.hazards.add(
                f"row {piece.row}: {len(numbers) - len(inside) + int(bad.sum())} of its pages lie "
                "outside the block table or the cache; the kernel does not check"
            )
        pages = torch.cat([torch.where(bad, 0, pages), pages.new_zeros(len(numbers) - len(inside))])
        keys = cache[pages.to(device), :, head].double()
        wrong = torch.ones(len(numbers), dtype=torch.bool, device=device)
        wrong[: len(inside)] = bad.to(device)
        keys = torch.where(wrong.reshape(-1, 1, 1), float("nan"), keys)
        keys = keys.reshape(1, -1, cache.shape[-1])
        token = torch.arange(keys.shape[1], device=device) + piece.start * BLOCK_SIZE
        hidden = torch.arange(s_q - 1, -1, -1, device=device) if self.causal else 0
        border = torch.as_tensor(self.seq_lens[piece.row] - hidden, device=device)
        return Keys(keys, token.unsqueeze(0) < border.reshape(-1, 1).expand(s_q, 1))
