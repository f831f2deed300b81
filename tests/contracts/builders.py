"""Recordings built by hand, one forward at a time."""

from __future__ import annotations

from typing import Any

from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.model import Recording, Value

BACKEND = "DeepseekSparseAttnBackend"


class Server:
    """One or several ranks to which events are added in order; numbers are given by the test."""

    def __init__(
        self,
        *,
        ranks: int = 1,
        attn_tp: int = 1,
        attn_cp: int = 1,
        release: str | None = "0.5.18",
        source: str = "replay",
        device: str | None = "cuda",
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.builder = RecordingBuilder({"source": source, "tier": "shape", "sglang": release})
        self._seq = [0] * ranks
        for rank in range(ranks):
            self.builder.add_process(
                {
                    "global_rank": rank,
                    "replica": 0,
                    "pp_rank": 0,
                    "tp_size": ranks * attn_tp,
                    "attn_tp_size": attn_tp,
                    "attn_cp_size": attn_cp,
                    "attn_dp_size": ranks,
                    "role": "null",
                    "complete": 1,
                    "dropped": 0,
                },
                {
                    "sglang": {"version": release},
                    "parallel": {"attn_tp_size": attn_tp, "attn_cp_size": attn_cp},
                    "device": {"type": device},
                    "environment": {},
                    **(facts or {}),
                },
            )

    def add(self, kind: str, rank: int = 0, **values: Any) -> int:
        """Add one event; dots in column names are written as two underscores."""
        entered = self._seq[rank]
        self._seq[rank] += 2
        common: dict[str, Value] = {
            "process": rank,
            "worker": "target",
            "batch": 0,
            "step": 1,
            "step_source": "sync",
            "phase": "serve",
            "enter_seq": entered,
            "exit_seq": entered + 1,
        }
        named = {name.replace("__", "."): value for name, value in values.items()}
        self.builder.add_event(kind, {**common, **named})
        return entered

    def plan(self, rows: int, entry: dict[str, Value], rank: int = 0, **values: Any) -> int:
        """A plan that made num_splits for `rows` rows."""
        given = {"planned__rows": rows, "num_splits__rows": rows + 1, **values}
        return self.add(
            "plan", rank, backend=BACKEND, function="init_forward_metadata", entry=entry, **given
        )

    def pad(
        self, entry: dict[str, Value], exit: dict[str, Value], rank: int = 0, **values: Any
    ) -> int:
        return self.add(
            "pad", rank, function="prepare_mlp_sync_batch", entry=entry, exit=exit, **values
        )

    def finish(self, coverage: dict[str, Any] | None = None) -> Recording:
        return self.builder.finish(coverage)


def batch(mode: str, rows: int, requests: int, width: int | None = None, **more: Any) -> dict:
    """A snapshot with the rows of one batch."""
    snapshot: dict[str, Value] = {
        "forward_mode": mode,
        "batch_size": requests,
        "input_ids.rows": rows,
    }
    if width is not None:
        snapshot["spec_info.num_tokens_per_req"] = width
    return {**snapshot, **{name.replace("__", "."): value for name, value in more.items()}}


def report_30296(q: int = 8, planned: int = 6, requests: int = 1, attn_tp: int = 8) -> Recording:
    """The draft-extend of sglang#30296: width 6, planned before the pad aligns to attention TP.

    With one request on attention TP 8 it has 6 rows planned and 8 rows of q; with three on
    attention TP 4, 18 and 20. Both pairs are in the report's discussion and were measured.
    """
    server = Server(attn_tp=attn_tp)
    raw = batch("DRAFT_EXTEND_V2", planned, requests, 6)
    server.plan(planned, raw, worker="draft", draft_step=0)
    server.add(
        "forward", worker="draft", forward=0, draft_step=0, forward_mode="DRAFT_EXTEND_V2",
        can_run_graph=0,
    )  # fmt: skip
    padded = batch("DRAFT_EXTEND_V2", q, requests, 6)
    server.pad(raw, padded, worker="draft", forward=0, draft_step=0)
    return server.finish()


def report_34443() -> Recording:
    """The verify of sglang#34443: 6 rows of q, num_splits of 9, context parallel 8."""
    server = Server(attn_cp=8, release="0.5.17")
    raw = batch("TARGET_VERIFY", 6, 1, 6)
    server.add("forward", forward=0, forward_mode="TARGET_VERIFY", can_run_graph=0)
    server.pad(raw, raw, forward=0)
    server.plan(8, raw, forward=0)
    return server.finish()


def agreeing() -> Recording:
    """A verify of three requests on attention TP 1: 18 rows, num_splits 19."""
    server = Server()
    raw = batch("TARGET_VERIFY", 18, 3, 6)
    server.add("forward", forward=0, forward_mode="TARGET_VERIFY", can_run_graph=0)
    server.pad(raw, raw, forward=0)
    server.plan(18, raw, forward=0)
    return server.finish()
