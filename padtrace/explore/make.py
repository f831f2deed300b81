"""Makes the Recording that a configuration would give, before anything is padded.

It holds what a server's scheduler hands to SGLang (rows, lengths, per-rank counts) and the order in
which the eager path calls SGLang's functions. What those functions compute is "not observed": that
is what a replay fills in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from padtrace.errors import UsageError
from padtrace.explore.case_input import MAX_CASES, CaseInput, case_error, read_case
from padtrace.recording.absent import Absent
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.model import Recording, Snapshot, Value

Plan = Literal["auto", "before", "after"]

SEQ_LEN = 100
CAPTURED_BS = [1, 2, 4, 8, 12, 16, 24, 32]

# The eager path plans these before the pad; everything else after it.
_PLANNED_BEFORE = {("DRAFT_EXTEND_V2", "draft_extend"), ("DECODE", "draft")}

_SPEC_CLASSES = {
    "verify": "EagleVerifyInput",
    "draft": "EagleDraftInput",
    "draft_extend": "EagleDraftExtendInput",
}

# A DSA model of the size that public reports ran; the row counts do not depend on the numbers.
_MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "context_len": 163_840,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
}

# What a text model without extras holds as None in every release.
_NONE_FIELDS = (
    "input_embeds.rows",
    "mrope_positions.rows",
    "encoder_lens.rows",
    "mamba_track_indices.rows",
    "mamba_track_mask.rows",
    "mamba_track_seqlens.rows",
    "tbo_split_seq_index",
)


def make(cases: Any, plan: Plan = "auto") -> Recording:
    """A recording from one case, a list of cases, or an object with `"cases"`.

    Args:
        cases: `{"id": ..., "input": {...}}`, a bare input, a list of these, or
            `{"cases": [...]}`; the keys of an input are those of `CaseInput`'s source.
        plan: whether attention metadata is planned before or after the pad; "auto" takes the
            side that SGLang's eager path takes for the mode.

    Raises:
        UsageError: naming the key that is wrong.
    """
    if plan not in ("auto", "before", "after"):
        raise UsageError(
            f"cannot plan {plan!r}", "a plan is made before or after the pad", "use --plan auto"
        )
    parsed = [read_case(raw, position) for position, raw in enumerate(_as_list(cases))]
    builder = RecordingBuilder(
        {"source": "made", "tier": "shape", "sglang": None, "notes": [], "plan": plan}
    )
    grouped: dict[str, _Process] = {}
    for case in parsed:
        key = repr(_topology(case))
        if key not in grouped:
            grouped[key] = _Process(case)
        grouped[key].cases.append(case)
    for process in grouped.values():
        row = builder.add_process(process.columns(), process.facts(plan))
        for case in process.cases:
            _Events(builder, row, process, case, plan).write()
    return builder.finish({"hooks": {}, "blind": {}})


def _as_list(cases: Any) -> Sequence[Any]:
    if isinstance(cases, Mapping) and "cases" in cases:
        unknown = cases.keys() - {"cases", "meta"}
        if unknown:
            raise case_error("the file", f"unknown key {sorted(unknown)[0]!r} beside 'cases'")
        cases = cases["cases"]
        if not isinstance(cases, list):
            raise case_error("the file", "key 'cases' must be a list")
    listed = cases if isinstance(cases, list) else [cases]
    if not 0 < len(listed) <= MAX_CASES:
        raise case_error("the file", f"it has {len(listed)} cases; 1 to {MAX_CASES} are possible")
    return listed


def _topology(case: CaseInput) -> tuple[Any, ...]:
    """What a process fixes: cases that agree in it share one process."""
    return (
        *(case.attn_tp, case.attn_cp, case.attn_dp, case.dp_rank, case.cp_v2, case.cp_mode),
        *(case.draft_token_num, case.prefill_graph_bs, case.custom_ar_max, case.dsa),
        *(case.device, case.topk, _algorithm(case)),
    )


class _Process:
    """The cases of one topology, and the counters their events share."""

    def __init__(self, case: CaseInput) -> None:
        self.first = case
        self.cases: list[CaseInput] = []
        self.sequence = 0
        self.batches = 0
        self.forwards = 0

    def columns(self) -> dict[str, Value]:
        case = self.first
        return {
            "global_rank": case.dp_rank * case.attn_tp * case.attn_cp,
            "node": 0,
            "replica": 0,
            "pp_rank": 0,
            "tp_rank": case.dp_rank * case.attn_tp * case.attn_cp,
            "attn_dp_rank": case.dp_rank,
            "attn_tp_rank": 0,
            "attn_cp_rank": 0,
            "pp_size": 1,
            "tp_size": case.attn_tp * case.attn_cp * case.attn_dp,
            "attn_dp_size": case.attn_dp,
            "attn_tp_size": case.attn_tp,
            "attn_cp_size": case.attn_cp,
            "role": "null",
            "complete": 1,
            "dropped": 0,
        }

    def facts(self, plan: Plan) -> dict[str, Any]:
        case = self.first
        columns = self.columns()
        sizes = ("tp_size", "tp_rank", "attn_tp_size", "attn_tp_rank", "attn_cp_size")
        ranks = ("attn_cp_rank", "attn_dp_size", "attn_dp_rank", "pp_size", "pp_rank")
        worker = {
            "backend": "DeepseekSparseAttnBackend" if case.dsa else None,
            "model_config": dict(_MODEL_CONFIG),
            "page_size": 64,
            "kv_cache_dtype": "torch.float8_e4m3fn",
            "kv_cache_dim": 656,
            "seq_len_fill_value": 1,
            "decode_graph_bs": CAPTURED_BS if case.graph else [],
            "prefill_graph_bs": list(case.prefill_graph_bs),
            "speculative_num_draft_tokens": case.draft_token_num,
            "topk": case.topk,
        }
        return {
            "parallel": {name: columns[name] for name in sizes + ranks},
            "environment": {"SGLANG_ENABLE_CP_V2": "1"} if case.cp_v2 else {},
            "server_args": _server_args(case),
            "workers": {"target": worker, "draft": dict(worker)},
            "custom_all_reduce_max_bytes": case.custom_ar_max,
            "case": {
                "plan": plan,
                "device": case.device,
                "cases": [
                    {"id": member.case_id, "batch": batch}
                    for batch, member in enumerate(self.cases)
                ],
            },
        }


def _algorithm(case: CaseInput) -> str | None:
    return case.graph.algorithm if case.graph else "EAGLE" if case.spec else None


def _server_args(case: CaseInput) -> dict[str, Any]:
    algorithm = _algorithm(case)
    return {
        "tp_size": case.attn_tp * case.attn_cp * case.attn_dp,
        "dp_size": case.attn_dp,
        "enable_dp_attention": case.attn_dp > 1,
        "attn_cp_size": case.attn_cp,
        "prefill_context_parallel_mode": case.cp_mode if case.attn_cp > 1 else None,
        "dsa_prefill_backend": "flashmla_kv",
        "dsa_decode_backend": "flashmla_kv",
        "speculative_algorithm": None if algorithm == "NONE" else algorithm,
        "speculative_num_draft_tokens": case.draft_token_num,
        "speculative_eagle_topk": case.topk,
    }


class _Events:
    """Writes the events of one case, numbered in the order of the eager path."""

    def __init__(
        self,
        builder: RecordingBuilder,
        row: int,
        process: _Process,
        case: CaseInput,
        plan: Plan,
    ) -> None:
        self.builder = builder
        self.process = process
        self.case = case
        early = (case.forward_mode, case.spec) in _PLANNED_BEFORE
        self.plan_first = early if plan == "auto" else plan == "before"
        self.common: dict[str, Value] = {
            "process": row,
            "worker": case.worker,
            "batch": process.batches,
            "step": process.batches + 1,
            "step_source": "sync",
            "phase": "serve",
        }
        process.batches += 1

    def write(self) -> None:
        self._batch()
        if self.case.graph:
            for runner in self.case.graph.runners:
                self._graph(runner)
        for draft_step in range(self.case.steps):
            self.common["draft_step"] = draft_step
            if self.plan_first:
                self._plan()
                self._add("ready", {"replan_equivalent": 0})
            self._forward()

    def _forward(self) -> None:
        self.common["forward"] = self.process.forwards
        self.process.forwards += 1
        enter = self._next()
        self.common["parent"] = enter
        if self.case.mlp_sync:
            self._add("pad", {"function": "prepare_mlp_sync_batch"})
        if not self.plan_first:
            self._plan()
        self._add("launch", {"function": "flash_mla_with_kvcache", "count": 1})
        hidden: Value = Absent.NOT_OBSERVED if self.case.logits_hidden else None
        if self.case.mlp_sync:
            self._add("unpad", {"hidden_states_before.rows": hidden})
        self.common["parent"] = Absent.NOT_OBSERVED
        values: dict[str, Value] = {"forward_mode": self.case.forward_mode, "can_run_graph": 0}
        self._add("forward", values, enter=enter)
        del self.common["forward"]

    def _plan(self) -> None:
        dsa = self.case.dsa
        values: dict[str, Value] = {
            "backend": "DeepseekSparseAttnBackend" if dsa else None,
            "backend_id": 0 if self.case.worker == "target" else 1,
            "function": "init_forward_metadata" if dsa else "pad_dsa_cache_seqlens",
        }
        self._add("plan", values)

    def _graph(self, runner: str) -> None:
        assert self.case.graph is not None
        values: dict[str, Value] = {
            "runner": runner,
            "algorithm": self.case.graph.algorithm,
            "raw_bs": self.case.batch_size,
            "num_tokens_per_bs": self.case.width,
            "captured_bs": list(CAPTURED_BS),
            "max_bs": max(CAPTURED_BS),
        }
        self._add("graph", {**values, "function": "can_run_graph"})
        self._add("graph", {**values, "function": "load_batch"})

    def _batch(self) -> None:
        enter = self._next()
        counts = list(self.case.raw_counts)
        draft = self.case.draft_raw
        if self.case.mlp_sync:
            self._add(
                "sync",
                {
                    "counts_before": counts,
                    "logprob_counts_before": counts,
                    "draft_counts_before": None if draft is None else list(draft),
                    "can_run_dp_cuda_graph": 1,
                    "parent": enter,
                },
            )
        exit_snapshot = snapshot_before_padding(self.case)
        self._add("batch", {"function": "made", "exit": exit_snapshot}, enter=enter)

    def _add(self, kind: str, values: Mapping[str, Value], enter: int | None = None) -> None:
        entered = self._next() if enter is None else enter
        numbered: dict[str, Value] = {"enter_seq": entered, "exit_seq": self._next()}
        self.builder.add_event(kind, {**self.common, **numbered, **values})

    def _next(self) -> int:
        number = self.process.sequence
        self.process.sequence += 1
        return number


def snapshot_before_padding(case: CaseInput) -> Snapshot:
    """The batch of the rank under test as its maker hands it on."""
    requests = case.batch_size
    seq_lens = _seq_lens(case)
    tokens = _token_rows(case)
    rows: Snapshot = {
        f"{name}.rows": requests
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "orig_seq_lens", "lora_ids")
    }
    rows.update({f"{name}.rows": tokens for name in ("input_ids", "positions", "out_cache_loc")})
    rows.update(dict.fromkeys(_NONE_FIELDS))
    total = sum(seq_lens)
    if case.spec == "draft" and case.forward_mode == "DECODE":
        rows["positions.rows"] = requests * case.topk
    return {
        **rows,
        "forward_mode": case.forward_mode,
        "batch_size": requests,
        "seq_lens_cpu.max": max(seq_lens, default=0),
        "seq_lens_cpu.sum": total,
        "seq_lens_sum": total,
        "num_token_non_padded_cpu": tokens,
        "is_extend_in_batch": int(case.is_extend_in_batch),
        "can_run_dp_cuda_graph": 1,
        "can_run_dp_breakable_cuda_graph": int(case.can_run_prefill_graph),
        **_extend_fields(case, seq_lens),
        **_spec_fields(case, tokens),
    }


def _token_rows(case: CaseInput) -> int:
    if case.forward_mode == "EXTEND":
        return sum(case.extend_lens)
    if case.forward_mode in ("TARGET_VERIFY", "DRAFT_EXTEND_V2"):
        return case.batch_size * case.width
    return case.batch_size


def _seq_lens(case: CaseInput) -> list[int]:
    if case.forward_mode == "EXTEND":
        prefix = case.prefix_lens or (0,) * len(case.extend_lens)
        return [old + new for old, new in zip(prefix, case.extend_lens, strict=True)]
    return list(case.seq_lens) or [SEQ_LEN] * case.batch_size


def _extend_fields(case: CaseInput, seq_lens: list[int]) -> Snapshot:
    names = ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc")
    lists = ("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu")
    if case.forward_mode == "EXTEND":
        extend = list(case.extend_lens)
    elif case.forward_mode == "DRAFT_EXTEND_V2":
        extend = [case.width] * case.batch_size
    else:
        absent: Snapshot = {f"{name}.rows": None for name in names}
        return {**absent, **dict.fromkeys(lists), "extend_num_tokens": None}
    prefix = [max(total - new, 0) for total, new in zip(seq_lens, extend, strict=True)]
    fields: Snapshot = {f"{name}.rows": len(extend) for name in names}
    fields["extend_seq_lens_cpu"] = extend
    fields["extend_prefix_lens_cpu"] = prefix
    fields["extend_logprob_start_lens_cpu"] = list(prefix)
    fields["extend_num_tokens"] = sum(extend)
    return fields


def _rows_per_request(case: CaseInput) -> int:
    """Of a draft's forwards, rows are requests x top-k."""
    return max(case.width, case.topk) if case.spec == "draft" else case.width


def _spec_fields(case: CaseInput, tokens: int) -> Snapshot:
    if case.spec is None:
        return {"spec_info": None}
    requests = case.batch_size
    hidden = tokens if case.hidden_states else None
    fields: Snapshot = {
        "spec_info": _SPEC_CLASSES[case.spec],
        "spec_info.num_tokens_per_req": _rows_per_request(case),
        "spec_info.draft_probs.rows": None,
        "spec_info.positions.rows": None,
    }
    if case.spec == "verify":
        fields["spec_info.draft_token_num"] = case.draft_token_num
        return fields
    logprob = case.logprob_width if case.logprob_width is not None else case.width
    fields["spec_info.num_tokens_for_logprob_per_req"] = logprob
    fields["spec_info.hidden_states.rows"] = hidden
    if case.spec == "draft":
        fields["spec_info.topk_p.rows"] = fields["spec_info.topk_index.rows"] = requests
    else:
        fields["spec_info.num_correct_drafts.rows"] = requests
        fields["spec_info.num_accept_tokens.rows"] = requests
    return fields
