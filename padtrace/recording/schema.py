"""What a recording holds: one table per kind of event, one line of meaning per column.

This file is the single source: the reader, the writer, the ring, `padtrace show --json` and
`docs/recording-format.md` all follow it. It is plain Python, since it also runs in the server.

Version rule: columns may be added (a reader fills an unknown past with "not observed"); a column
is never renamed, removed or given another meaning without a new `FORMAT_VERSION`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FORMAT_NAME = "padtrace-recording"
FORMAT_VERSION = 1


class ColumnType(enum.Enum):
    """How the integers of a column are to be read."""

    INT = "int"
    BOOL = "bool"
    STRING = "string"  # an index into the string table
    VECTOR = "vector"  # a row of the table `vector`
    STRINGS = "strings"  # a row of the table `vector`, whose values index the string table
    SNAPSHOT = "snapshot"  # a row of the table `snapshot`


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name as `show --json` prints it, its type, unit and meaning.

    Attributes:
        optional: whether a row may hold an absent code instead of a value. Nearly every column is
            optional, since nobody may have looked; the others place an event, and nothing could be
            said of one without them.
    """

    name: str
    type: ColumnType
    unit: str
    meaning: str
    optional: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the file."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


def _rows(name: str, meaning: str) -> Column:
    return Column(name, ColumnType.INT, "rows", meaning)


def _int(name: str, unit: str, meaning: str, *, optional: bool = True) -> Column:
    return Column(name, ColumnType.INT, unit, meaning, optional)


def _bool(name: str, meaning: str) -> Column:
    return Column(name, ColumnType.BOOL, "0 or 1", meaning)


def _string(name: str, meaning: str) -> Column:
    return Column(name, ColumnType.STRING, "name", meaning)


def _vector(name: str, unit: str, meaning: str) -> Column:
    return Column(name, ColumnType.VECTOR, unit, meaning)


def _snapshot(name: str, meaning: str) -> Column:
    return Column(name, ColumnType.SNAPSHOT, "row of snapshot", meaning)


# Present in every event table. The enter and exit numbers order events within one process and
# nest them; the order is evidence, since a plan made before the pad is the bug of sglang#30296.
HEADER = (
    _int("process", "row of process", "which recorded process", optional=False),
    _string("worker", "target or draft: whose model runner the event belongs to"),
    _int("batch", "id", "ForwardBatch object, numbered per process at first sight"),
    _int(
        "forward",
        "id",
        "ModelRunner.forward call, numbered per process; one batch can serve several",
    ),
    _int("draft_step", "index", "step of a multi-step draft, 0 for the first"),
    _int(
        "step", "count", "calls of the sync collective (or run_batch rounds) in this process so far"
    ),
    _string("step_source", "sync: counted by prepare_mlp_sync_batch_raw; round: by run_batch"),
    _int("enter_seq", "count", "order of entry among all events of the process", optional=False),
    _int(
        "exit_seq", "count", "order of exit in the same numbering; not observed if it never ended"
    ),
    _int("parent", "enter_seq", "the event of the same process this one is nested in"),
    _string("phase", "warmup, capture or serve"),
    _int("t_ns", "ns since the epoch", "time of entry, by the clock pair of the process"),
)

# The integers and row counts of one ForwardBatch at one moment. Every `*.rows` is shape[0] of a
# tensor or len() of a list, except mrope_positions, whose token axis is its second.
SNAPSHOT = Table(
    "snapshot",
    "rows and host-held integers of one ForwardBatch at one moment; equal ones are stored once",
    (
        _string("forward_mode", "ForwardMode by name"),
        _int("batch_size", "requests", "ForwardBatch.batch_size"),
        _rows("input_ids.rows", "token rows: what q will have"),
        _rows("positions.rows", "positions of the tokens"),
        _rows("out_cache_loc.rows", "KV slots to write"),
        _rows("req_pool_indices.rows", "one per request"),
        _rows("seq_lens.rows", "one per request, on the device"),
        _rows("seq_lens_cpu.rows", "one per request, host mirror"),
        _int("seq_lens_cpu.max", "tokens", "longest sequence, from the host mirror"),
        _int("seq_lens_cpu.sum", "tokens", "sum over the host mirror"),
        _int("seq_lens_sum", "tokens", "the sum the batch carries; may disagree with the mirror"),
        _rows("orig_seq_lens.rows", "one per request"),
        _int("extend_num_tokens", "tokens", "ForwardBatch.extend_num_tokens"),
        _rows("extend_seq_lens.rows", "one per request, on the device"),
        _rows("extend_prefix_lens.rows", "one per request, on the device"),
        _rows("extend_start_loc.rows", "one per request, on the device"),
        _vector("extend_seq_lens_cpu", "tokens", "new tokens of each request, host list"),
        _vector("extend_prefix_lens_cpu", "tokens", "cached tokens of each request, host list"),
        _vector("extend_logprob_start_lens_cpu", "tokens", "first token with a logprob, host list"),
        _rows("input_embeds.rows", "embeddings given instead of ids"),
        _rows("mrope_positions.rows", "token axis (dimension 1)"),
        _rows("lora_ids.rows", "one per request, host list"),
        _rows("encoder_lens.rows", "one per request"),
        _rows("mamba_track_indices.rows", "one per request"),
        _rows("mamba_track_mask.rows", "one per request"),
        _rows("mamba_track_seqlens.rows", "one per request"),
        _vector("global_num_tokens_cpu", "tokens", "per-rank counts as the batch holds them now"),
        _vector("original_global_num_tokens_cpu", "tokens", "per-rank counts before spec scaling"),
        _vector("global_num_tokens_for_logprob_cpu", "tokens", "per-rank logprob counts"),
        _rows("global_num_tokens_gpu.rows", "entries of the device copy of the counts"),
        _int("num_token_non_padded_cpu", "tokens", "real tokens before padding"),
        _bool("is_extend_in_batch", "some rank of the group extends"),
        _bool(
            "dp_spec_prefill_coordination_applied",
            "a plan for drafts beside prefills made the counts; they are not scaled (0.5.23)",
        ),
        _bool("can_run_dp_cuda_graph", "the group's vote on decode graphs"),
        _bool("can_run_dp_breakable_cuda_graph", "the group's vote on prefill graphs"),
        _string("dp_padding_mode", "MAX_LEN or SUM_LEN once chosen"),
        _int("global_dp_buffer_len", "tokens", "rows of the gathered buffer"),
        _string("original_forward_mode", "_original_forward_mode: the mode before a relabel"),
        _int("original_batch_size", "requests", "_original_batch_size, kept by the pad"),
        _int("original_num_tokens", "tokens", "_original_num_tokens, kept by the pad"),
        _bool("forward_metadata_ready", "planned outside the forward; do not plan again"),
        _int("forward_metadata_planned_bs", "requests", "batch size when marked ready"),
        _int("forward_metadata_planned_num_tokens", "tokens", "token rows when marked ready"),
        _bool("forward_metadata_replan_equivalent", "a forward-path re-plan is allowed"),
        _int("tbo_split_seq_index", "index", "two-batch overlap: where the batch is split"),
        _int("tbo_padded_len", "tokens", "two-batch overlap: padded rows of a child"),
        _int("tbo_children", "count", "two-batch overlap: number of children"),
        _rows("attn_cp_metadata.rows", "context parallel: tokens of this rank's shard"),
        _string("spec_info", "class of the speculative input"),
        _int("spec_info.num_tokens_per_req", "tokens", "rows each request takes in this forward"),
        _int("spec_info.num_tokens_for_logprob_per_req", "tokens", "logprob rows of each request"),
        _int("spec_info.draft_token_num", "tokens", "draft tokens of a verify"),
        _rows("spec_info.topk_p.rows", "one per request"),
        _rows("spec_info.topk_index.rows", "one per request"),
        _rows("spec_info.hidden_states.rows", "rows of the draft's hidden states"),
        _rows("spec_info.draft_probs.rows", "one per request"),
        _rows("spec_info.num_correct_drafts.rows", "one per request"),
        _rows("spec_info.num_accept_tokens.rows", "one per request"),
        _rows("spec_info.positions.rows", "positions the speculative input carries"),
    ),
)

PROCESS = Table(
    "process",
    "one recorded process (a made recording: one per distinct topology); its facts are JSON",
    (
        _int("global_rank", "rank", "rank among all model processes of the server"),
        _int("node", "index", "node_rank of the server arguments"),
        _int("replica", "rank", "DP rank of the replica this process belongs to (plain DP)"),
        _int("pp_rank", "rank", "pipeline stage"),
        _int("tp_rank", "rank", "tensor-parallel rank"),
        _int("attn_dp_rank", "rank", "attention data-parallel rank"),
        _int("attn_tp_rank", "rank", "attention tensor-parallel rank"),
        _int("attn_cp_rank", "rank", "attention context-parallel rank"),
        _int("pp_size", "ranks", "pipeline stages"),
        _int("tp_size", "ranks", "tensor-parallel size"),
        _int("attn_dp_size", "ranks", "attention data-parallel size"),
        _int("attn_tp_size", "ranks", "attention tensor-parallel size"),
        _int("attn_cp_size", "ranks", "attention context-parallel size"),
        _string("role", "null, prefill or decode (disaggregation)"),
        _int("pid", "process id", "of the recorded process"),
        _int("started_ns", "ns since the epoch", "when recording began"),
        _bool("complete", "the process ended recording in good order"),
        _int("dropped", "events", "events lost because the ring was full or torn"),
    ),
)

VECTOR = Table(
    "vector",
    "lists of integers that events and snapshots refer to by row; equal ones are stored once",
    (),
)

EVENTS = (
    Table(
        "forward",
        "one ModelRunner.forward call",
        (
            _snapshot("entry", "the batch as the forward met it"),
            _string("forward_mode", "ForwardMode at entry, by name"),
            _bool("can_run_graph", "whether the forward ran in a graph, as its output says"),
            _bool("failed", "an exception left it"),
        ),
    ),
    Table(
        "batch",
        "one ForwardBatch made by init_new (or given its counts otherwise)",
        (
            _string("function", "what made it: init_new, construction, made"),
            _snapshot("exit", "the batch as it was handed on"),
        ),
    ),
    Table(
        "sync",
        "per-rank counts given to a batch: init_mlp_sync_metadata, or the block that init_new had",
        (
            _string("function", "init_mlp_sync_metadata, or init_new where the block is inline"),
            _vector("counts_before", "tokens", "the scheduler's counts, before spec scaling"),
            _vector("counts_after", "tokens", "the counts of the batch, after spec scaling"),
            _vector("logprob_counts_before", "tokens", "the scheduler's logprob counts"),
            _vector("logprob_counts_after", "tokens", "the batch's logprob counts"),
            _vector("original_counts", "tokens", "original_global_num_tokens_cpu"),
            _vector("draft_counts_before", "tokens", "the scheduler's counts for draft workers"),
            _vector(
                "draft_logprob_counts_before", "tokens", "its logprob counts for draft workers"
            ),
            _bool("aliases_scheduler_list", "the batch holds the scheduler's own list object"),
            _bool("can_run_dp_cuda_graph", "the group's vote on decode graphs"),
        ),
    ),
    Table(
        "plan",
        "attention metadata made: init_forward_metadata and its graph and multi-step relatives",
        (
            _string("backend", "class of the attention backend"),
            _int("backend_id", "id", "backend object, numbered per process"),
            _string("function", "the method that planned"),
            _snapshot("entry", "the batch as the plan met it"),
            _rows("planned.rows", "rows given to the FlashMLA metadata call (cache_seqlens)"),
            _rows("num_splits.rows", "length of the num_splits vector"),
            _rows("page_table_1.rows", "rows of the token-granular page table"),
            _int("page_table_1.width", "columns", "columns of the token-granular page table"),
            _rows("real_page_table.rows", "rows of the page-granular table"),
            _int("real_page_table.width", "columns", "columns of the page-granular table"),
            _rows("cache_seqlens_int32.rows", "KV lengths per request"),
            _rows("cu_seqlens_q.rows", "cumulative query lengths"),
            _rows("cu_seqlens_k.rows", "cumulative KV lengths"),
            _rows("dsa_cache_seqlens_int32.rows", "KV lengths per token row, padded"),
            _rows("dsa_cu_seqlens_q.rows", "cumulative query lengths per token row"),
            _rows("dsa_cu_seqlens_k.rows", "cumulative KV lengths per token row"),
            _rows("dsa_seqlens_expanded.rows", "KV lengths per token row, unpadded"),
            _rows("dsa_extend_seq_lens_list.rows", "host list of query lengths"),
            _rows("token_to_batch_idx.rows", "request of each token"),
            _rows("indexer_seq_lens.rows", "KV lengths the indexer sees"),
            _rows("topk_indices_offset.rows", "offsets of ragged top-k"),
            _rows("paged_mqa_ctx_lens_2d.rows", "context lengths of the DeepGEMM schedule"),
            _int("max_seq_len_q", "tokens", "longest query"),
            _int("max_seq_len_k", "tokens", "longest KV"),
            _int("seq_lens_sum", "tokens", "sum the metadata carries"),
            _int("graph_bucket", "requests", "captured batch size a graph plan was made for"),
            _rows("num_splits_slice.rows", "num_splits slice taken for a graph bucket"),
            _int("num_splits_slice.wanted", "rows", "length the slice asked for"),
        ),
    ),
    Table(
        "ready",
        "mark_forward_metadata_ready, or the skip flag of older releases",
        (
            _bool("replan_equivalent", "a forward-path re-plan is allowed"),
            _int("planned_bs", "requests", "batch size when marked"),
            _int("planned_num_tokens", "tokens", "token rows when marked"),
        ),
    ),
    Table(
        "pad",
        "prepare_mlp_sync_batch, or _pad_inputs_to_size called alone",
        (
            _string("function", "prepare_mlp_sync_batch or _pad_inputs_to_size"),
            _snapshot("entry", "the batch as the pad met it"),
            _snapshot("exit", "the batch as the pad left it"),
            _int("num_tokens", "tokens", "rows asked of _pad_inputs_to_size"),
            _int("bs", "requests", "requests asked of _pad_inputs_to_size"),
            _bool("scheduler_list_changed", "the scheduler's count list was edited in place"),
            _rows("owner.extend_seq_lens_cpu.rows", "the caller's own list, after the pad"),
            _rows("owner.extend_prefix_lens_cpu.rows", "the caller's own list, after the pad"),
            _rows(
                "owner.extend_logprob_start_lens_cpu.rows", "the caller's own list, after the pad"
            ),
            _rows("owner.lora_ids.rows", "the caller's own list, after the pad"),
        ),
    ),
    Table(
        "graph",
        "a graph runner judged or sized a batch",
        (
            _string("runner", "class of the graph runner"),
            _string("function", "can_run_graph, load_batch, replay, _max_dp_batch_size, ..."),
            _snapshot("entry", "the batch as the runner met it"),
            _string("algorithm", "speculative algorithm by name"),
            _int("raw_bs", "requests", "batch size before the bucket"),
            _int("num_tokens_per_bs", "tokens", "captured width per request"),
            _vector("captured_bs", "requests", "captured batch sizes"),
            _int("max_bs", "requests", "largest captured batch size"),
            _bool("verdict", "whether the graph may run"),
            _int("bucket_argument", "requests", "the number the bucket was chosen for"),
            _int("bucket", "requests", "the bucket chosen"),
        ),
    ),
    Table(
        "launch",
        "an attention kernel called; equal launches of one forward are one event with a count",
        (
            _string("function", "the kernel's Python name"),
            _vector("q.shape", "elements", "shape of q; its first is the row count"),
            _string("q.dtype", "element type of q"),
            _rows("num_splits.rows", "length of the num_splits vector"),
            _rows("tile_scheduler_metadata.rows", "SM parts of the schedule"),
            _rows("cache_seqlens.rows", "KV lengths"),
            _vector("block_table.shape", "elements", "page table the kernel reads"),
            _vector("indices.shape", "elements", "top-k indices"),
            _vector("k_cache.shape", "elements", "KV cache as viewed by the kernel"),
            _string("k_cache.dtype", "element type of the KV cache"),
            _int("head_dim_v", "elements", "value head size"),
            _bool("is_fp8_kvcache", "KV pages are FP8"),
            _int("count", "launches", "equal launches of this forward, this one included"),
            _bool("failed", "an exception left the call"),
            _int(
                "plan_seq",
                "enter_seq",
                "the plan whose num_splits it was given, by the identity of the tensor",
            ),
        ),
    ),
    Table(
        "unpad",
        "post_forward_mlp_sync_batch",
        (
            _snapshot("entry", "the batch as the unpad met it"),
            _snapshot("exit", "the batch as the unpad left it"),
            _rows("logits_before.rows", "next_token_logits at entry"),
            _rows("logits_after.rows", "next_token_logits at exit"),
            _rows("hidden_states_before.rows", "logits_output.hidden_states at entry"),
            _rows("hidden_states_after.rows", "logits_output.hidden_states at exit"),
        ),
    ),
    Table(
        "error",
        "an exception that left a hooked function, where it was first seen",
        (
            _string("function", "the hooked function it left"),
            _string("type", "class of the exception"),
            _string("message", "its text if it fits a shipped template, otherwise blake2b:<hash>"),
            Column(
                "frames",
                ColumnType.STRINGS,
                "file:line function",
                "the last frames, outermost first",
            ),
        ),
    ),
)

EVENT_KINDS = tuple(table.name for table in EVENTS)
EVENT_TABLES = {table.name: table for table in EVENTS}


def event_columns(kind: str) -> tuple[Column, ...]:
    """Header and own columns of one kind of event, in file order."""
    return HEADER + EVENT_TABLES[kind].columns


def all_tables() -> tuple[Table, ...]:
    """Every table with its full column list, as the documentation prints them."""
    events = tuple(Table(table.name, table.meaning, HEADER + table.columns) for table in EVENTS)
    return (PROCESS, SNAPSHOT, VECTOR, *events)
