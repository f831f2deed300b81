"""What SGLang's functions read besides the batch, once per process.

`Recording.facts[i]` is the JSON object of process i; `Facts` is its typed view. Keys that a view
does not know are kept in the file and ignored here. What was not observed is None or empty: a made
recording states only what its configuration fixes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from padtrace.errors import BadRecordingError


class SGLangFacts(msgspec.Struct, kw_only=True):
    """Which SGLang ran."""

    version: str | None = None
    commit: str | None = None


class ParallelFacts(msgspec.Struct, kw_only=True):
    """Sizes and ranks, as `sglang.srt.runtime_context.get_parallel()` gives them."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    attn_tp_size: int = 1
    attn_tp_rank: int = 0
    attn_cp_size: int = 1
    attn_cp_rank: int = 0
    attn_dp_size: int = 1
    attn_dp_rank: int = 0
    moe_ep_size: int = 1
    moe_tp_size: int | None = None
    moe_dp_size: int | None = None


class WorkerFacts(msgspec.Struct, kw_only=True):
    """One model runner: the target's or the draft's.

    Attributes:
        backend: class of the attention backend; None where none was seen.
        model_config: the subset of the model configuration that padding and planning read:
            architectures, context_len, num_attention_heads, kv_lora_rank, qk_nope_head_dim,
            qk_rope_head_dim, index_topk and the like.
        page_size: tokens per KV page.
        kv_cache_dtype: element type of the KV cache, as torch prints it.
        kv_cache_dim: elements (or bytes of the FP8 layout) per KV token, where the pool has it.
        seq_len_fill_value: what padded requests get as length
            (`get_cuda_graph_seq_len_fill_value`).
        decode_graph_bs, prefill_graph_bs: captured batch sizes; empty without graphs.
        req_to_token_shape: rows and columns of the request-to-token table.
        speculative_num_draft_tokens, speculative_num_steps, topk: draft widths.
    """

    backend: str | None = None
    model_config: dict[str, Any] = {}
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_cache_dim: int | None = None
    seq_len_fill_value: int | None = None
    decode_graph_bs: list[int] = []
    prefill_graph_bs: list[int] = []
    req_to_token_shape: list[int] = []
    speculative_num_draft_tokens: int | None = None
    speculative_num_steps: int | None = None
    topk: int | None = None


class DeviceFacts(msgspec.Struct, kw_only=True):
    """The accelerator, or the lack of one."""

    type: str | None = None
    sm_count: int | None = None
    capability: list[int] = []


class CaseEntry(msgspec.Struct, kw_only=True):
    """One case of a made recording and the batch it became."""

    id: str | None = None
    batch: int | None = None


class CaseFacts(msgspec.Struct, kw_only=True):
    """What a made process was made from.

    Attributes:
        plan: auto, before or after: when metadata are planned.
    """

    plan: str | None = None
    cases: list[CaseEntry] = []


class Facts(msgspec.Struct, kw_only=True):
    """All facts of one process.

    Attributes:
        server_args: the resolved server arguments; "[not recorded]" is a name whose value is not
            in the file (`padtrace.sharing.kept` says which are).
        environment: SGLANG_* variables; values likewise.
        workers: by "target" and "draft".
        custom_all_reduce_max_bytes: largest message custom all-reduce takes; None if it is off.
        fingerprints: dotted name of each hooked function to the hash of its source.
        host: a number for the machine, only where recorded by a server.
        case: the configuration a made recording was made from.
    """

    sglang: SGLangFacts = msgspec.field(default_factory=SGLangFacts)
    server_args: dict[str, Any] = {}
    environment: dict[str, str] = {}
    parallel: ParallelFacts = msgspec.field(default_factory=ParallelFacts)
    workers: dict[str, WorkerFacts] = {}
    device: DeviceFacts = msgspec.field(default_factory=DeviceFacts)
    custom_all_reduce_max_bytes: int | None = None
    fingerprints: dict[str, str] = {}
    host: str | None = None
    case: CaseFacts | None = None


def view(facts: dict[str, Any]) -> Facts:
    """The typed view of one process's facts.

    Raises:
        BadRecordingError: a known key holds something of the wrong type.
    """
    try:
        return msgspec.convert(facts, Facts)
    except msgspec.ValidationError as error:
        raise BadRecordingError(
            "bad recording: the facts of a process cannot be read",
            str(error),
            "the file was not written by padtrace; ask for it again",
        ) from error
