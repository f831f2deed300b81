"""Recordings made of measured cases: what a release's own functions gave, as a replay would say it.

The numbers are those of `tests/cases`; nothing here computes a row count.
"""

from __future__ import annotations

from typing import Any

from padtrace.recording.model import Recording
from tests.contracts.builders import BACKEND, Server

_ROWS = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "seq_lens",
    "seq_lens_cpu",
    "req_pool_indices",
    "extend_seq_lens",
    "extend_prefix_lens",
    "lora_ids",
)
_PLAIN = ("batch_size", "seq_lens_sum", "extend_num_tokens", "forward_mode", "dp_padding_mode")
_SPEC = ("hidden_states", "topk_p", "topk_index", "num_correct_drafts", "num_accept_tokens")
_LISTS = {
    "extend_seq_lens_cpu": "ext",
    "extend_prefix_lens_cpu": "pre",
    "extend_logprob_start_lens_cpu": "logp",
}
_PLAN_ROWS = (
    "cache_seqlens_int32",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "dsa_cache_seqlens_int32",
    "dsa_cu_seqlens_q",
    "dsa_cu_seqlens_k",
    "dsa_seqlens_expanded",
)
_PLANNED_BEFORE = {("DRAFT_EXTEND_V2", "draft_extend"), ("DECODE", "draft")}


def live_plan(case: dict[str, Any]) -> str:
    """Which plan the eager path works with: `before` or `after` the pad."""
    key = (case["input"]["forward_mode"], case["input"].get("spec"))
    return "before" if key in _PLANNED_BEFORE else "after"


def recording_of(case: dict[str, Any], release: str, plan: str | None = None) -> Recording:
    """One case on one release, its plan made before or after the pad (by default the live one)."""
    given, measured = case["input"], case["expected"][release]
    server = Server(
        attn_tp=given["attn_tp"], attn_cp=given.get("attn_cp", 1), release=release,
        facts={"case": {"cases": [{"id": case["id"], "batch": 0}]}},
    )  # fmt: skip
    worker = "draft" if given.get("spec") in ("draft", "draft_extend") else "target"
    plan = plan or live_plan(case)
    raw = _snapshot(measured["raw"], given)
    if plan == "before":
        _plan(server, measured, "before", raw, worker)
    padded = measured["pad"]
    if "error" in padded:
        _error(server, "prepare_mlp_sync_batch", padded, worker)
        return server.finish()
    after = _snapshot(padded, given)
    q_rows = measured.get("dsa", {}).get(plan, {}).get("q_rows", measured["q_rows"])
    if q_rows != padded["input_ids"]:
        after["attn_cp_metadata.rows"] = q_rows
    server.pad(raw, after, worker=worker, draft_step=0, **_owners(measured, padded))
    if plan == "after":
        _plan(server, measured, "after", after, worker)
    if after["forward_mode"] == "EXTEND":
        # What reaches the kernel in a prefill is for the layers to say: the harness asked them.
        _launch(server, measured, plan, q_rows, worker)
    _unpad(server, measured, after, given, worker)
    return server.finish()


def _snapshot(block: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    snapshot = {f"{name}.rows": block[name] for name in _ROWS if name in block}
    snapshot |= {name: block[name] for name in _PLAIN if name in block}
    snapshot |= {
        f"spec_info.{name}.rows": block[f"spec.{name}"] for name in _SPEC if f"spec.{name}" in block
    }
    snapshot |= {name: [0] * block[name] for name in _LISTS if block.get(name) is not None}
    if "seq_lens_sum_true" in block:
        snapshot["seq_lens_cpu.sum"] = block["seq_lens_sum_true"]
    if given.get("spec"):
        snapshot["spec_info.num_tokens_per_req"] = given["width"]
    return snapshot


def _plan(
    server: Server, measured: dict[str, Any], when: str, entry: dict[str, Any], worker: str
) -> None:
    made = measured.get("dsa", {}).get(when, {})
    if "error" in made or "num_splits" not in made:
        return
    values: dict[str, Any] = {f"{name}.rows": made[name] for name in _PLAN_ROWS if name in made}
    for name in ("page_table_1", "real_page_table"):
        values[f"{name}.rows"], values[f"{name}.width"] = made[name]
    values["max_seq_len_k"] = made["max_seq_len_k"]
    server.add(
        "plan", backend=BACKEND, function="init_forward_metadata", entry=entry, worker=worker,
        draft_step=0, num_splits__rows=made["num_splits"], planned__rows=made["num_splits"] - 1,
        **values,
    )  # fmt: skip


def _launch(server: Server, measured: dict[str, Any], plan: str, q_rows: int, worker: str) -> None:
    made = measured.get("dsa", {}).get(plan, {})
    if "error" not in made and "num_splits" in made:
        server.add(
            "launch", function="flash_mla_with_kvcache", q__shape=[q_rows, 1, 64, 576],
            num_splits__rows=made["num_splits"], worker=worker, draft_step=0,
        )  # fmt: skip


def _owners(measured: dict[str, Any], padded: dict[str, Any]) -> dict[str, Any]:
    edited = padded.get("owner_lists_mutated", [])
    raw = measured["raw"]
    values: dict[str, Any] = {
        f"owner.{name}.rows": padded[name] if short in edited else raw[name]
        for name, short in _LISTS.items()
        if raw.get(name) is not None
    }
    values["scheduler_list_changed"] = int(padded.get("scheduler_list_mutated", False))
    return values


def _unpad(
    server: Server,
    measured: dict[str, Any],
    entry: dict[str, Any],
    given: dict[str, Any],
    worker: str,
) -> None:
    block = measured.get("unpad") or {}
    if "error" in block:
        _error(server, "post_forward_mlp_sync_batch", block, worker)
    elif block:
        after = _snapshot(block, given)
        server.add("unpad", entry=entry, exit=after, worker=worker, draft_step=0)


def _error(server: Server, function: str, block: dict[str, Any], worker: str) -> None:
    server.add(
        "error", function=function, type=block["error"], message=block["msg"], worker=worker
    )  # fmt: skip
