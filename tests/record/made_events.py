"""Made events of a plausible server: what the ring and seal are measured and tested with.

One rank of a data-parallel DSA server with attention TP: eight events a forward, requests that
come and go, sequences that grow, an extend now and then. Made up, but every column that a live
server fills is filled, and what moves from step to step moves here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from padtrace.record import wire
from padtrace.record.native import Snapshot
from padtrace.record.ring import EventWriter
from padtrace.recording import schema
from padtrace.recording.absent import NO_ATTRIBUTE_CODE, NONE_CODE, NOT_OBSERVED_CODE

EVENTS_PER_FORWARD = 8
_HIDDEN = 7168

_ALWAYS_NONE = (
    "input_embeds.rows",
    "mrope_positions.rows",
    "encoder_lens.rows",
    "mamba_track_indices.rows",
    "mamba_track_mask.rows",
    "mamba_track_seqlens.rows",
    "attn_cp_metadata.rows",
    "tbo_split_seq_index",
)
_NO_ATTRIBUTE = ("can_run_dp_breakable_cuda_graph", "forward_metadata_planned_num_tokens")


class MadeRank:
    """One rank; ranks of the same `dp_rank` see the same requests."""

    def __init__(
        self,
        writer: EventWriter,
        *,
        dp_rank: int = 0,
        dp_size: int = 2,
        attn_tp: int = 4,
        seed: int = 1,
    ) -> None:
        self.writer = writer
        self.dp_rank, self.dp_size, self.attn_tp = dp_rank, dp_size, attn_tp
        # All ranks draw the same numbers, so that counts agree within the server.
        self._random = random.Random(seed)
        self._jitter = random.Random(f"{seed}/{writer.path}")
        self._sums = [[self._random.randrange(100, 4000) for _ in range(4)] for _ in range(dp_size)]
        self._seq = 0
        self._forward = 0
        self._batch = 0
        self._snapshots: dict[tuple[int, ...], Snapshot] = {}
        self._now = writer.clock_offset_ns + 5_000_000_000
        self._ids = {kind: wire.kind_index(kind) for kind in schema.EVENT_KINDS}

    def forwards(self, count: int) -> Iterator[int]:
        """Write the events of `count` forwards; yields after each."""
        for _ in range(count):
            self._one_forward()
            yield self._forward

    def _one_forward(self) -> None:
        lens, counts, extend = self._schedule()
        self._forward += 1
        self._batch += 1
        self._now += 18_000_000 + self._jitter.randrange(4_000_000)
        bs, tokens = len(lens), counts[self.dp_rank]
        before = self._snapshot(lens, tokens, counts, extend)
        padded = max(-(-n // self.attn_tp) * self.attn_tp for n in counts)
        after = self._padded(before, padded, bs)
        ready = dict(before, batch_size=bs)
        self._event("batch", {"function": "init_new", "exit": before}, parent=None, close=True)
        self._event("sync", self._sync(counts), parent=None, close=True)
        forward = self._event("forward", {"entry": ready, "forward_mode": before["forward_mode"]})
        self._event("graph", self._graph(before, bs), parent=forward, close=True)
        self._event("pad", self._pad(before, after, padded, bs), parent=forward, close=True)
        self._event("plan", self._plan(after, padded, extend), parent=forward, close=True)
        launch = self._event("launch", self._launch(padded), parent=forward, close=True)
        self._update("launch", launch, count=61)
        self._event("unpad", self._unpad(after, before, padded, tokens), parent=forward, close=True)
        self._seq += 1
        self._update("forward", forward, exit_seq=self._seq, can_run_graph=0, failed=0)

    def _schedule(self) -> tuple[list[int], list[int], bool]:
        extend = self._random.random() < 0.08
        for sums in self._sums:
            if self._random.random() < 0.1 and len(sums) > 1:
                sums.pop(self._random.randrange(len(sums)))
            if self._random.random() < 0.1 and len(sums) < 32:
                sums.append(self._random.randrange(50, 6000))
            for i in range(len(sums)):
                sums[i] += self._random.choice((1, 2, 2, 3))
        lens = self._sums[self.dp_rank]
        width = 1 if extend else 2
        counts = [len(sums) * width for sums in self._sums]
        if extend:
            counts = [self._random.randrange(1, 2000) for _ in counts]
        return lens, counts, extend

    def _snapshot(
        self, lens: list[int], tokens: int, counts: list[int], extend: bool
    ) -> dict[str, Any]:
        bs = len(lens)
        rows: dict[str, Any] = dict.fromkeys(wire.SNAPSHOT_NAMES, NONE_CODE)
        for column in schema.SNAPSHOT.columns:
            if column.unit == "rows" and column.name not in _ALWAYS_NONE:
                token_rows = column.name in (
                    "input_ids.rows",
                    "positions.rows",
                    "out_cache_loc.rows",
                )
                rows[column.name] = tokens if token_rows else bs
        rows.update(dict.fromkeys(_NO_ATTRIBUTE, NO_ATTRIBUTE_CODE))
        rows.update(
            {
                "forward_mode": "EXTEND" if extend else "DECODE",
                "batch_size": bs,
                "seq_lens_cpu.max": max(lens),
                "seq_lens_cpu.sum": sum(lens),
                "seq_lens_sum": sum(lens),
                "global_num_tokens_cpu": list(counts),
                "original_global_num_tokens_cpu": list(counts),
                "global_num_tokens_for_logprob_cpu": list(counts),
                "num_token_non_padded_cpu": tokens,
                "is_extend_in_batch": int(extend),
                "can_run_dp_cuda_graph": int(not extend),
                "global_dp_buffer_len": sum(counts),
                "forward_metadata_ready": 0,
                "tbo_children": 0,
                "spec_info": "EagleDraftInput",
                "spec_info.num_tokens_per_req": 2,
                "spec_info.num_tokens_for_logprob_per_req": 1,
                "spec_info.draft_token_num": 2,
            }
        )
        if extend:
            rows["extend_num_tokens"] = tokens
            rows["extend_seq_lens_cpu"] = [tokens // bs] * bs
            rows["extend_prefix_lens_cpu"] = [n // 64 * 64 for n in lens]
            rows["extend_logprob_start_lens_cpu"] = [tokens // bs] * bs
        return rows

    def _padded(self, before: dict[str, Any], padded: int, bs: int) -> dict[str, Any]:
        after = dict(before)
        after.update(
            {
                name: padded
                for name, rows in before.items()
                if name.endswith(".rows") and rows not in (NONE_CODE, NO_ATTRIBUTE_CODE)
            }
        )
        after.update(
            {
                "batch_size": padded // 2 or 1,
                "global_num_tokens_cpu": [padded] * self.dp_size,
                "dp_padding_mode": "MAX_LEN",
                "global_dp_buffer_len": padded * self.dp_size,
                "original_batch_size": bs,
                "original_num_tokens": before["input_ids.rows"],
                "original_forward_mode": before["forward_mode"],
            }
        )
        return after

    def _sync(self, counts: list[int]) -> dict[str, Any]:
        names = ("counts_before", "counts_after", "logprob_counts_before")
        lists = {name: list(counts) for name in (*names, "logprob_counts_after", "original_counts")}
        return {
            "function": "init_mlp_sync_metadata",
            **lists,
            "aliases_scheduler_list": 0,
            "can_run_dp_cuda_graph": 1,
        }

    def _graph(self, before: dict[str, Any], bs: int) -> dict[str, Any]:
        return {
            "runner": "CudaGraphRunner",
            "function": "can_run_graph",
            "entry": before,
            "algorithm": "EAGLE",
            "raw_bs": bs,
            "num_tokens_per_bs": 2,
            "captured_bs": [1, 2, 4, 8, 12, 16, 24, 32],
            "max_bs": 32,
            "verdict": 0,
        }

    def _pad(
        self, before: dict[str, Any], after: dict[str, Any], padded: int, bs: int
    ) -> dict[str, Any]:
        return {
            "function": "prepare_mlp_sync_batch",
            "entry": before,
            "exit": after,
            "num_tokens": padded,
            "bs": bs,
            "scheduler_list_changed": 1,
            "owner.extend_seq_lens_cpu.rows": bs,
            "owner.extend_prefix_lens_cpu.rows": bs,
            "owner.extend_logprob_start_lens_cpu.rows": bs,
            "owner.lora_ids.rows": NONE_CODE,
        }

    def _plan(self, after: dict[str, Any], padded: int, extend: bool) -> dict[str, Any]:
        values: dict[str, Any] = {
            "backend": "DeepseekSparseAttnBackend",
            "backend_id": 0,
            "function": "init_forward_metadata",
            "entry": after,
        }
        for column in schema.EVENT_TABLES["plan"].columns:
            if column.unit == "rows":
                values[column.name] = padded + column.name.startswith(
                    ("num_splits", "cu_", "dsa_cu")
                )
        longest = after["seq_lens_cpu.max"]
        values.update(
            {
                "page_table_1.width": longest,
                "real_page_table.width": -(-longest // 64),
                "max_seq_len_q": 1,
                "max_seq_len_k": longest,
                "seq_lens_sum": after["seq_lens_sum"],
                "graph_bucket": NONE_CODE,
            }
        )
        return values

    def _launch(self, padded: int) -> dict[str, Any]:
        return {
            "function": "flash_mla_with_kvcache",
            "q.shape": [padded, 1, 64, 576],
            "q.dtype": "torch.bfloat16",
            "num_splits.rows": padded + 1,
            "tile_scheduler_metadata.rows": 66,
            "cache_seqlens.rows": padded,
            "block_table.shape": [padded, 2048],
            "indices.shape": [padded, 1, 2048],
            "k_cache.shape": [4321, 64, 1, 656],
            "k_cache.dtype": "torch.float8_e4m3fn",
            "head_dim_v": 512,
            "is_fp8_kvcache": 1,
            "count": 1,
            "failed": 0,
        }

    def _unpad(
        self, after: dict[str, Any], before: dict[str, Any], padded: int, tokens: int
    ) -> dict[str, Any]:
        left = dict(
            before, dp_padding_mode="MAX_LEN", global_num_tokens_cpu=after["global_num_tokens_cpu"]
        )
        return {
            "entry": after,
            "exit": left,
            "logits_before.rows": padded,
            "logits_after.rows": tokens,
            "hidden_states_before.rows": padded,
            "hidden_states_after.rows": tokens,
        }

    def _event(
        self, kind: str, values: dict[str, Any], *, parent: int | None = None, close: bool = False
    ) -> int:
        self._now += 80_000 + self._jitter.randrange(60_000)
        self._seq += 1
        enter = self._seq
        exit_seq = NOT_OBSERVED_CODE
        if close:
            self._seq += 1
            exit_seq = self._seq
        head = {
            "worker": "target",
            "batch": self._batch,
            "forward": self._forward,
            "draft_step": NONE_CODE,
            "step": self._forward,
            "step_source": "sync",
            "enter_seq": enter,
            "exit_seq": exit_seq,
            "parent": NONE_CODE if parent is None else parent,
            "phase": "serve",
            "t_ns": self._now,
        }
        self.writer.write(self._ids[kind], *self.numbers(kind, {**head, **values}))
        return enter

    def _update(self, kind: str, enter_seq: int, **values: int) -> None:
        pairs: list[int] = []
        for name, value in values.items():
            pairs += (wire.column_index(kind, name), value)
        self.writer.update(self._ids[kind], enter_seq, pairs)

    def numbers(self, kind: str, values: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Scalars and vector values of one event, given by column name."""
        scalars: list[int] = []
        tail: list[int] = []
        for column in schema.event_columns(kind):
            value = values.get(column.name, NOT_OBSERVED_CODE)
            if isinstance(value, dict):
                scalars.append(self.writer.keep(self._snapshot_of(value)))
            else:
                scalars.append(self._scalar(value, tail))
        return scalars, tail

    def _snapshot_of(self, columns: dict[str, Any]) -> Snapshot:
        """Equal ones are one object, as they are when a batch is looked at again."""
        values: list[int] = []
        scalars = [self._scalar(columns[name], values) for name in wire.SNAPSHOT_NAMES]
        key = (*scalars, *values)
        found = self._snapshots.pop(key, None) or Snapshot(scalars, values)
        self._snapshots = {**dict(list(self._snapshots.items())[-3:]), key: found}
        return found

    def _scalar(self, value: Any, tail: list[int]) -> int:
        if isinstance(value, str):
            return self.writer.string(value)
        if isinstance(value, list):
            tail += [self._scalar(item, tail) for item in value]
            return len(value)
        return int(value)


def rank_facts(*, tp_rank: int, tp_size: int, dp_size: int = 2, **more: Any) -> dict[str, Any]:
    """Facts of one rank of a server with data-parallel attention."""
    attn_tp = tp_size // dp_size
    return {
        "sglang": {"version": "0.5.18"},
        "server_args": {"enable_dp_attention": True, "dp_size": dp_size, "tp_size": tp_size},
        "parallel": {
            "tp_size": tp_size,
            "tp_rank": tp_rank,
            "pp_size": 1,
            "pp_rank": 0,
            "attn_tp_size": attn_tp,
            "attn_tp_rank": tp_rank % attn_tp,
            "attn_dp_size": dp_size,
            "attn_dp_rank": tp_rank // attn_tp,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
        },
        **more,
    }
