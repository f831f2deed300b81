"""The positive list: every text that leaves a server by name, and why.

Numbers, booleans, None and lists of these are kept wherever they stand, except under the name of a
secret. So is a server argument whose value is one of the words that a tested release of SGLang lets
one choose from (`server_arguments.json`, made by `scripts/server_arguments.py`). The words are
shipped and not asked of the server: a plugin can add words of its own there, asking costs SGLang
seconds of imports, and a file must be provable where no SGLang is. Of every other text there is a
row here, or what was set is a name without its value.

It runs in the server: plain Python, and nothing raises.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

# A recording says which list chose what it holds; raise it with every change of the rows below.
# Recordings without a number come from before there was a list.
LIST_VERSION = 1


class Kind(enum.Enum):
    """What a text must look like to be kept."""

    NAME = "a name of code"
    NAMES = "names of code"
    PATTERN = "letters of a layer pattern"
    VERSION = "a version"
    HASH = "a hash"
    MODEL = "a model's name, without the folders before it"
    NODE = "a number for a machine"
    SWITCH = "a number or a switch"
    WORD = "one of the words listed"
    COMMAND = "flags, and values by this list"
    TEXT = "a text without the shape of a secret"


@dataclass(frozen=True, slots=True)
class Kept:
    """One row of the list.

    Attributes:
        place: where it stands in a recording; `*` is any one name.
        reason: what the text is needed for.
        words: the words of kind WORD.
    """

    place: str
    kind: Kind
    reason: str
    words: tuple[str, ...] = ()


FACTS = (
    Kept("sglang.version", Kind.VERSION, "the release a replay takes"),
    Kept("sglang.commit", Kind.HASH, "tells builds of one release apart"),
    Kept("host", Kind.NODE, "tells the machines of a server apart, not which they are"),
    Kept("recorder.in_shared_memory", Kind.TEXT, "why the ring lay there: its file system"),
    Kept("recorder.tier", Kind.WORD, "what may be in the file", ("shape", "meta", "full")),
    Kept("workers.*.backend", Kind.NAME, "class of the attention backend: whose rules hold"),
    Kept("workers.*.kv_cache_dtype", Kind.NAME, "element type: the layout of the KV cache"),
    Kept("workers.*.model_config.architectures", Kind.NAMES, "the model's kind"),
    Kept("workers.*.model_config.model_type", Kind.NAME, "the model's kind"),
    Kept("workers.*.model_config.attention_arch", Kind.NAME, "the model's kind of attention"),
    Kept(
        "workers.*.model_config.mtp_hybrid_override_pattern",
        Kind.PATTERN,
        "which layers of the draft attend",
    ),
    Kept("device.type", Kind.NAME, "the kind of accelerator"),
    Kept(
        "process.role",
        Kind.WORD,
        "which half of a disaggregated server",
        ("null", "prefill", "decode"),
    ),
    Kept("server_args.model_path", Kind.MODEL, "which model was served"),
    Kept("server_args.speculative_draft_model_path", Kind.MODEL, "which draft model was served"),
    Kept("server_args.speculative_algorithm", Kind.NAME, "which draft workers there are"),
    Kept("server_args.device", Kind.NAME, "the kind of accelerator"),
    Kept(
        "server_args.prefill_context_parallel_mode",
        Kind.WORD,
        "how context parallelism splits a prefill",
        ("in-seq-split", "round-robin-split"),
    ),
    Kept("fingerprints.*", Kind.HASH, "whether the functions that ran are the release's own"),
    Kept(
        "case.plan", Kind.WORD, "a made recording: when it was planned", ("auto", "before", "after")
    ),
    Kept("case.cases.id", Kind.TEXT, "a made recording: which case of the file it was made from"),
)

_ABOUT_WORDS = ("server", "made", "replay")
ABOUT = (
    Kept("source", Kind.WORD, "where the file comes from", _ABOUT_WORDS),
    Kept("of_source", Kind.WORD, "where the replayed file comes from", _ABOUT_WORDS),
    Kept("tier", Kind.WORD, "what may be in the file", ("shape", "meta", "full")),
    Kept("plan", Kind.WORD, "a made recording: when it was planned", ("auto", "before", "after")),
    Kept("sglang", Kind.VERSION, "the release that ran"),
    Kept("release", Kind.NAME, "the release that was asked for"),
    Kept("recorded_on", Kind.VERSION, "the release that was recorded"),
    Kept(
        "sglang_source",
        Kind.WORD,
        "what kind of SGLang a replay ran",
        ("wheel", "checkout", "installed"),
    ),
    Kept("of", Kind.HASH, "which file was replayed"),
    Kept("producer", Kind.TEXT, "which padtrace wrote the file"),
    Kept("run", Kind.NAME, "tells starts of one server apart"),
    Kept("command", Kind.COMMAND, "how the server was started"),
    Kept("notes", Kind.TEXT, "what padtrace had to say about making the file"),
    Kept("fingerprints", Kind.NAME, "whether the functions that ran are the release's own"),
    Kept("chain_texts", Kind.TEXT, "the arithmetic of SGLang's calls, step by step"),
    Kept("shared", Kind.TEXT, "what `padtrace redact` took out, in counts"),
)

_ATTENTION = "how the sparse attention is planned and called"
_PARALLEL = "how ranks share a batch"
_GRAPHS = "what is padded for graphs"
_SPECULATIVE = "how drafts are batched"
ENVIRONMENT = tuple(
    Kept(f"environment.{name}", Kind.SWITCH, reason)
    for reason, names in (
        (
            "whether prefill context parallelism is the second version; a replay needs it",
            ("SGLANG_ENABLE_CP_V2",),
        ),
        (
            _PARALLEL,
            (
                "SGLANG_DP_USE_GATHERV", "SGLANG_DP_MASK_PAD_ROWS", "SGLANG_ENABLE_DP_GATHER_FP8",
                "SGLANG_SCHEDULER_SKIP_ALL_GATHER",
            ),
        ),
        (
            _SPECULATIVE,
            (
                "SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION",
                "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "SGLANG_ENABLE_PP_SPEC",
                "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
            ),
        ),
        (
            _GRAPHS,
            (
                "SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH", "SGLANG_USE_BREAKABLE_CUDA_GRAPH",
                "SGLANG_ENABLE_SINGLE_CG_DRAFT", "SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH",
                "SGLANG_ENABLE_TORCH_COMPILE", "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
            ),
        ),
        (
            _ATTENTION,
            (
                "SGLANG_DSA_FUSE_TOPK", "SGLANG_NSA_FUSE_TOPK", "SGLANG_OPT_USE_TOPK_V2",
                "SGLANG_DISABLE_DSA_INDEXER_FUSION", "SGLANG_USE_FUSED_METADATA_COPY",
                "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
                "SGLANG_NSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
                "SGLANG_NSA_ENABLE_MTP_PRECOMPUTE_METADATA", "SGLANG_DSA_TRITON_PREFILL",
            ),
        ),
        (
            "which kernels can run",
            (
                "SGLANG_USE_CPU_ENGINE", "SGLANG_USE_AITER",
                "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
            ),
        ),
    )
    for name in names
)  # fmt: skip

# Where an object may stand; an object anywhere else is a name without its value.
OBJECTS = frozenset(
    (
        (),
        ("sglang",),
        ("environment",),
        ("recorder",),
        ("parallel",),
        ("workers",),
        ("workers", "*"),
        ("workers", "*", "model_config"),
        ("device",),
        ("process",),
        ("server_args",),
        ("fingerprints",),
        ("case",),
        ("case", "cases"),
    )
)


@dataclass(frozen=True, slots=True)
class ServerArguments:
    """What the tested releases say of their arguments.

    Attributes:
        choices: the words an argument can have.
        numbers: arguments that take numbers.
        flags: other names of arguments on the command line.
    """

    choices: Mapping[str, frozenset[str]] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()
    flags: Mapping[str, str] = field(default_factory=dict)


@cache
def server_arguments() -> ServerArguments:
    """The shipped file; nothing, so that less is kept, where it cannot be read."""
    try:
        read: dict[str, Any] = json.loads(
            Path(__file__).with_name("server_arguments.json").read_text("utf-8")
        )
        return ServerArguments(
            {name: frozenset(words) for name, words in read["choices"].items()},
            frozenset(read["numbers"]),
            dict(read["flags"]),
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return ServerArguments()
