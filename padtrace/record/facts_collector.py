"""The facts of a process: what SGLang's functions read besides the batch.

Read from objects that exist anyway, once per process and once per model runner. What a release does
not have is left out. What leaves this module is a positive list, `sharing.kept`.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from padtrace.record.ring_file import boot_id
from padtrace.recording.absent import NOT_RECORDED
from padtrace.sharing.kept import LIST_VERSION
from padtrace.sharing.rule import kept_facts, node_label

_PARALLEL = (
    "tp_size", "tp_rank", "pp_size", "pp_rank", "attn_tp_size", "attn_tp_rank", "attn_cp_size",
    "attn_cp_rank", "attn_dp_size", "attn_dp_rank", "moe_ep_size", "moe_tp_size", "moe_dp_size",
)  # fmt: skip
# Before runtime_context (0.5.12) the same facts came from functions of two modules.
_OLDER_PARALLEL = {
    "tp_size": ("distributed.parallel_state", "get_tensor_model_parallel_world_size"),
    "tp_rank": ("distributed.parallel_state", "get_tensor_model_parallel_rank"),
    "pp_size": ("distributed.parallel_state", "get_pipeline_model_parallel_world_size"),
    "pp_rank": ("distributed.parallel_state", "get_pipeline_model_parallel_rank"),
    "attn_tp_size": ("layers.dp_attention", "get_attention_tp_size"),
    "attn_tp_rank": ("layers.dp_attention", "get_attention_tp_rank"),
    "attn_cp_size": ("layers.dp_attention", "get_attention_cp_size"),
    "attn_cp_rank": ("layers.dp_attention", "get_attention_cp_rank"),
    "attn_dp_size": ("layers.dp_attention", "get_attention_dp_size"),
    "attn_dp_rank": ("layers.dp_attention", "get_attention_dp_rank"),
    "moe_ep_size": ("distributed.parallel_state", "get_moe_expert_parallel_world_size"),
    "moe_tp_size": ("distributed.parallel_state", "get_moe_tensor_parallel_world_size"),
    "moe_dp_size": ("distributed.parallel_state", "get_moe_data_parallel_world_size"),
}

# What padding and planning read of the model's configuration.
_MODEL_CONFIG = (
    "context_len", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim",
    "hidden_size", "vocab_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "model_is_mrope", "is_encoder_decoder", "is_generation", "attention_arch",
)  # fmt: skip
_HF_CONFIG = (
    "architectures", "model_type", "index_topk", "index_head_dim", "index_n_heads", "num_experts",
    "n_routed_experts", "num_nextn_predict_layers", "mtp_hybrid_override_pattern",
)  # fmt: skip

_SGLANG_PREFIXES = ("SGLANG_", "SGL_")
_MISSING = object()
# Whose wrappers are no change of what a function does.
_KNOWN_WRAPPERS = ("sglang", "torch", "functools", "contextlib", "padtrace")


def process_facts(tier: str) -> dict[str, Any]:
    """What is known before any model is loaded: the release, the environment, the machine."""
    facts: dict[str, Any] = {
        "sglang": _sglang(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SGLANG_PREFIXES)
        },
        "host": node_label(socket.gethostname().split(".")[0], boot_id()),
        "recorder": {"tier": tier, "list": LIST_VERSION},
    }
    return kept_facts(facts)


def parallel_facts() -> dict[str, int]:
    """Sizes and ranks of this process; only those that can be had."""
    context = sys.modules.get("sglang.srt.runtime_context")
    get_parallel = getattr(context, "get_parallel", None)
    found: dict[str, int] = {}
    for name in _PARALLEL:
        value = _call(partial(_attribute_of, get_parallel, name)) if get_parallel else None
        if value is None:
            module, function = _OLDER_PARALLEL[name]
            value = _call(getattr(sys.modules.get(f"sglang.srt.{module}"), function, None))
        if isinstance(value, int):
            found[name] = value
    return found


def _attribute_of(getter: Callable[[], Any], name: str) -> Any:
    return getattr(getter(), name)


def runner_facts(model_runner: Any) -> dict[str, Any]:
    """What one model runner adds: server arguments, ranks, its model, its device."""
    arguments = getattr(model_runner, "server_args", None)
    worker = "draft" if model_runner.is_draft_worker else "target"
    facts: dict[str, Any] = {
        "parallel": parallel_facts(),
        "workers": {worker: _worker(model_runner)},
        "device": _device(model_runner),
        "process": {"replica": _replica(model_runner, arguments), "role": _role(arguments)},
    }
    if arguments is not None:
        facts["server_args"] = {name: plain(value) for name, value in _fields(arguments).items()}
    limit = _custom_all_reduce_limit()
    if limit is not None:
        facts["custom_all_reduce_max_bytes"] = limit
    return kept_facts(facts)


def fingerprint(function: Any) -> str | None:
    """Hash of a function's source, or None where there is none (compiled).

    Decorators of SGLang, torch and the standard library are looked through, as are our own hooks;
    a wrapper that somebody else put around the function is part of what runs, so of the hash.
    """
    try:
        source = inspect.getsource(function)
        layer = function
        while (inner := getattr(layer, "__wrapped__", None)) is not None:
            if not _is_known_wrapper(layer):
                source += inspect.getsource(layer.__code__)
            layer = inner
    except (OSError, TypeError, AttributeError):
        return None
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()


def _is_known_wrapper(layer: Any) -> bool:
    home = getattr(layer, "__globals__", {}).get("__name__", "functools")
    return str(home).split(".")[0] in _KNOWN_WRAPPERS and not str(home).startswith("padtrace.lab")


def plain(value: Any) -> Any:
    """A value as the list can judge it; of an object only that there was one."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return NOT_RECORDED


def _fields(value: Any) -> dict[str, Any]:
    """The public fields of a dataclass, a msgspec struct or a plain object."""
    names: Any = getattr(value, "__struct_fields__", None) or getattr(value, "__dict__", ())
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


def _sglang() -> dict[str, Any]:
    package = sys.modules.get("sglang")
    version = getattr(sys.modules.get("sglang.version"), "__version__", None)
    commit = getattr(sys.modules.get("sglang._version"), "__commit_id__", None)
    version = version or getattr(package, "__version__", None)
    return {
        "version": version if isinstance(version, str) else None,
        "commit": commit if isinstance(commit, str) else None,
    }


def _worker(model_runner: Any) -> dict[str, Any]:
    arguments = getattr(model_runner, "server_args", None)
    backend = getattr(model_runner, "attn_backend", None)
    pool = getattr(model_runner, "token_to_kv_pool", None)
    table = getattr(getattr(model_runner, "req_to_token_pool", None), "req_to_token", None)
    facts: dict[str, Any] = {
        "backend": None if backend is None else type(backend).__name__,
        "model_config": _model_config(getattr(model_runner, "model_config", None)),
        "page_size": _integer(model_runner, "page_size"),
        "kv_cache_dtype": _dtype(model_runner, pool),
        "kv_cache_dim": _integer(pool, "kv_cache_dim"),
        "seq_len_fill_value": _fill_value(backend),
        "decode_graph_bs": _captured(
            model_runner, ("decode_cuda_graph_runner", "graph_runner"), "capture_bs"
        ),
        "prefill_graph_bs": _captured(
            model_runner,
            ("prefill_cuda_graph_runner", "piecewise_cuda_graph_runner"),
            "capture_num_tokens",
        ),
        "req_to_token_shape": [int(n) for n in getattr(table, "shape", ())],
        "topk": _integer(arguments, "speculative_eagle_topk"),
    }
    for name in ("speculative_num_draft_tokens", "speculative_num_steps"):
        facts[name] = _integer(arguments, name)
    return facts


def _model_config(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for names, holder in (
        (_MODEL_CONFIG, config),
        (_HF_CONFIG, getattr(config, "hf_config", None)),
    ):
        for name in names:
            value = getattr(holder, name, _MISSING)
            if value is not _MISSING:
                found[name] = plain(value)
    return found


def _device(model_runner: Any) -> dict[str, Any]:
    kind = getattr(model_runner, "device", None)
    facts: dict[str, Any] = {"type": kind if isinstance(kind, str) else None}
    torch = sys.modules.get("torch")
    if torch is not None and kind == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["sm_count"] = int(properties.multi_processor_count)
        facts["capability"] = [int(properties.major), int(properties.minor)]
    return facts


def _replica(model_runner: Any, arguments: Any) -> int:
    """DP rank of a plain data-parallel replica; attention DP shares one replica."""
    if getattr(arguments, "enable_dp_attention", False):
        return 0
    for holder in (getattr(model_runner, "ps", None), model_runner):
        rank = getattr(holder, "dp_rank", None)
        if isinstance(rank, int):
            return rank
    return 0


def _role(arguments: Any) -> str | None:
    mode = getattr(arguments, "disaggregation_mode", None)
    return mode if isinstance(mode, str) else None


def _fill_value(backend: Any) -> int | None:
    value = _call(getattr(backend, "get_cuda_graph_seq_len_fill_value", None))
    return value if isinstance(value, int) else None


def _captured(model_runner: Any, runners: tuple[str, ...], name: str) -> list[int]:
    for runner in runners:
        sizes = getattr(getattr(model_runner, runner, None), name, None)
        if isinstance(sizes, (list, tuple)):
            return [int(size) for size in sizes]
    return []


def _dtype(model_runner: Any, pool: Any) -> str | None:
    dtype = getattr(model_runner, "kv_cache_dtype", None) or getattr(pool, "dtype", None)
    return None if dtype is None else str(dtype)


def _custom_all_reduce_limit() -> int | None:
    state = sys.modules.get("sglang.srt.distributed.parallel_state")
    group = _call(getattr(state, "get_tp_group", None))
    value = getattr(getattr(group, "ca_comm", None), "max_size", None)
    return value if isinstance(value, int) else None


def _integer(holder: Any, name: str) -> int | None:
    value = getattr(holder, name, None)
    return value if isinstance(value, int) else None


def _call(function: Callable[[], Any] | None) -> Any:
    """The result of a getter that may not be ready yet or may not be there."""
    if function is None:
        return None
    try:
        return function()
    except Exception:
        return None
