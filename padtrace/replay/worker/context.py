"""The state of an SGLang process that its padding and planning read: arguments and topology.

SGLang's own overrides are used wherever a release has them; module globals where it does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from padtrace.recording.absent import NOT_RECORDED
from padtrace.recording.facts import Facts, WorkerFacts
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.model_config import model_values, strict_model_config
from padtrace.replay.worker.obstacles import import_or_none
from padtrace.replay.worker.process_groups import ProcessGroups

_SWITCH_CP_V2 = "SGLANG_ENABLE_CP_V2"

# Recorded arguments that name files, devices or places; a replay must not act on them.
_NEVER_APPLIED = frozenset(
    {
        "model_path",
        "tokenizer_path",
        "device",
        "load_format",
        "cuda_graph_config",
        "speculative_draft_model_path",
        "dsa_topk_backend",
        "speculative_dsa_topk_backend",
        "nsa_topk_backend",
    }
)


class Topology:
    """Published arguments and sizes of one recorded process.

    Attributes:
        server_args: the release's own `ServerArgs`, published.
    """

    def __init__(self, capabilities: Capabilities, facts: Facts) -> None:
        self._capabilities = capabilities
        self.facts = facts
        self.server_args: Any = None
        self.groups = ProcessGroups(facts, self._custom_all_reduce())

    @contextmanager
    def active(self) -> Iterator[Topology]:
        """Everything set, and put back at the end."""
        with ExitStack() as stack:
            self._switch_cp_v2(stack)
            self._publish(stack)
            self._model_config(stack)
            self._sizes(stack)
            self._dp_globals(stack)
            self._flags(stack)
            self._forget_cp_strategy()
            yield self

    @property
    def cp_v2(self) -> bool:
        """Whether prefill CP goes through CP-v2 here: by its switch, or because there is no
        other way any more."""
        if self._capabilities.cp_utils is None:
            return False
        if not hasattr(self._capabilities.cp_utils, "enable_cp_v2"):
            return True
        return self.facts.environment.get(_SWITCH_CP_V2, "").lower() in ("1", "true", "yes", "on")

    def target(self) -> WorkerFacts:
        return self.facts.workers.get("target", WorkerFacts())

    def _switch_cp_v2(self, stack: ExitStack) -> None:
        before = os.environ.get(_SWITCH_CP_V2)
        stack.callback(_restore_variable, _SWITCH_CP_V2, before)
        _restore_variable(_SWITCH_CP_V2, "1" if self.cp_v2 else None)

    def _publish(self, stack: ExitStack) -> None:
        fields = self._fields(_argument_names())
        context = self._capabilities.runtime_context
        if context is not None and hasattr(context, "get_context"):
            override = getattr(context.get_context(), "override_server_args", None)
            if override is not None:
                self.server_args = stack.enter_context(override(**fields))
                return
        module = self._capabilities.module("server arguments", "server_args")
        arguments = module.ServerArgs(model_path="dummy")
        for name, value in fields.items():
            object.__setattr__(arguments, name, value)
        publish = self._capabilities.attribute(
            "server arguments", module, "set_global_server_args_for_scheduler"
        )
        publish(arguments)
        self.server_args = arguments

    def _fields(self, known: frozenset[str]) -> dict[str, Any]:
        """Recorded arguments that this release has, and what a replay needs besides."""
        recorded = {n: v for n, v in self.facts.server_args.items() if v != NOT_RECORDED}
        fields = {
            name: value
            for name, value in recorded.items()
            if name in known and name not in _NEVER_APPLIED and _is_plain(value)
        }
        for name, value in self._derived(recorded).items():
            if name in known:
                fields[name] = value
        if "attn_dp_size" in known and self.facts.parallel.attn_dp_size > 1:
            # Where the two are apart, attention DP does not run inside replicas.
            fields["dp_size"] = 1
        return fields

    def _derived(self, recorded: dict[str, Any]) -> dict[str, Any]:
        parallel = self.facts.parallel
        target = self.target()
        mode = _cp_mode(recorded)
        prefill_cp = parallel.attn_cp_size > 1
        derived: dict[str, Any] = {
            "tp_size": parallel.tp_size,
            "dp_size": max(parallel.attn_dp_size, int(recorded.get("dp_size") or 1)),
            "attn_cp_size": parallel.attn_cp_size,
            "attn_dp_size": parallel.attn_dp_size,
            "ep_size": parallel.moe_ep_size,
            "enable_dp_attention": parallel.attn_dp_size > 1,
            # What a server resolves them to; "torch" has no fused top-k.
            "dsa_topk_backend": recorded.get("dsa_topk_backend") or "sgl-kernel",
            "speculative_dsa_topk_backend": recorded.get("speculative_dsa_topk_backend")
            or "sgl-kernel",
            "attention_backend": recorded.get("attention_backend") or self._dsa_name(),
            "cuda_graph_config": self._graph_config(target),
            "enable_prefill_cp": prefill_cp and self.cp_v2,
            "cp_strategy": "zigzag" if mode == "in-seq-split" else "interleave",
        }
        for family in ("dsa", "nsa"):
            derived[f"enable_{family}_prefill_context_parallel"] = prefill_cp
            derived[f"{family}_prefill_cp_mode"] = mode
            for phase in ("prefill", "decode"):
                derived[f"{family}_{phase}_backend"] = _dsa_backend(recorded, phase)
        if target.speculative_num_draft_tokens is not None:
            derived["speculative_num_draft_tokens"] = target.speculative_num_draft_tokens
        if target.speculative_num_steps is not None:
            derived["speculative_num_steps"] = target.speculative_num_steps
        return derived

    def _dsa_name(self) -> str:
        """What this release calls the DSA backend; a made recording does not say it."""
        module: str = self._capabilities.dsa_module.__name__
        return "nsa" if module.endswith("nsa_backend") else "dsa"

    def _graph_config(self, target: WorkerFacts) -> Any:
        module = import_or_none("sglang.srt.model_executor.cuda_graph_config")
        if module is None:
            return None
        config = module.CudaGraphConfig()
        config.prefill.bs = list(target.prefill_graph_bs) or None
        config.decode.bs = list(target.decode_graph_bs) or None
        return config

    def _model_config(self, stack: ExitStack) -> None:
        """`is_dsa_enable_prefill_cp` asks the published arguments for the model."""
        config = strict_model_config(self.target())
        overrides = import_or_none("sglang.srt.arg_groups.overrides")
        if overrides is not None and hasattr(overrides, "model_config_of"):
            stack.callback(setattr, overrides, "model_config_of", overrides.model_config_of)
            overrides.model_config_of = lambda server_args: config  # type: ignore[attr-defined]
        elif hasattr(type(self.server_args), "get_model_config"):
            object.__setattr__(self.server_args, "model_config", config)

    def _sizes(self, stack: ExitStack) -> None:
        context = self._capabilities.runtime_context
        values = self._parallel_values()
        self.groups.put_into_globals(stack)
        if context is None or not hasattr(context, "get_parallel"):
            return
        parallel = context.get_parallel()
        override = self._capabilities.attribute("topology override", parallel, "override")
        known = _parallel_names(context)
        stack.enter_context(
            override(**{name: value for name, value in values.items() if name in known})
        )

    def _parallel_values(self) -> dict[str, Any]:
        parallel = self.facts.parallel
        moe_tp = parallel.moe_tp_size
        if moe_tp is None:
            moe_tp = max(parallel.tp_size // max(parallel.moe_ep_size, 1), 1)
        moe_dp = max(parallel.tp_size // max(parallel.moe_ep_size * moe_tp, 1), 1)
        return {
            "tp_size": parallel.tp_size,
            "tp_rank": parallel.tp_rank,
            "pp_size": parallel.pp_size,
            "pp_rank": parallel.pp_rank,
            "attn_tp_size": parallel.attn_tp_size,
            "attn_tp_rank": parallel.attn_tp_rank,
            "attn_cp_size": parallel.attn_cp_size,
            "attn_cp_rank": parallel.attn_cp_rank,
            "attn_dp_size": parallel.attn_dp_size,
            "attn_dp_rank": parallel.attn_dp_rank,
            "moe_ep_size": parallel.moe_ep_size,
            "moe_ep_rank": 0,
            "moe_tp_size": moe_tp,
            "moe_tp_rank": 0,
            "moe_dp_size": moe_dp,
            "moe_dp_rank": 0,
            "dcp_enabled": False,
            "attn_dcp_size": 1,
            "attn_dcp_rank": 0,
            "enable_dp_attention": parallel.attn_dp_size > 1,
            **self.groups.published(),
        }

    def _custom_all_reduce(self) -> Any:
        """Of the tensor-parallel group: an object with its size limit, or None where it is off."""
        limit = self.facts.custom_all_reduce_max_bytes
        kind = getattr(self._capabilities.dp_module, "CustomAllReduceV2", None)
        if limit is None or kind is None:
            return None
        all_reduce = object.__new__(kind)
        all_reduce.disabled = False
        all_reduce.max_size = limit
        return all_reduce

    def _dp_globals(self, stack: ExitStack) -> None:
        parallel = self.facts.parallel
        module = self._capabilities.dp_module
        for name, value in (
            ("_ATTN_DP_SIZE", parallel.attn_dp_size),
            ("_ATTN_DP_RANK", parallel.attn_dp_rank),
        ):
            if hasattr(module, name):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)

    def _flags(self, stack: ExitStack) -> None:
        context = self._capabilities.runtime_context
        if context is None or not hasattr(context, "get_flags"):
            return
        flags = getattr(context.get_flags(), "dp", None)
        if flags is None or not hasattr(flags, "buffer_hidden_size"):
            return
        import torch

        values = model_values(self.target())
        stack.enter_context(
            flags.override(
                buffer_hidden_size=int(values["hidden_size"]), buffer_dtype=torch.bfloat16
            )
        )

    def _forget_cp_strategy(self) -> None:
        base = import_or_none("sglang.srt.layers.cp.base")
        if base is not None and hasattr(base, "_STRATEGY"):
            base._STRATEGY = None  # type: ignore[attr-defined]


def _argument_names() -> frozenset[str]:
    from sglang.srt.server_args import ServerArgs

    names = getattr(ServerArgs, "__struct_fields__", None)
    return frozenset(names if names is not None else ServerArgs.__dataclass_fields__)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, (bool, int, float, str)) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _cp_mode(recorded: dict[str, Any]) -> str:
    for name in ("dsa_prefill_cp_mode", "nsa_prefill_cp_mode", "prefill_context_parallel_mode"):
        if recorded.get(name):
            return str(recorded[name])
    return "in-seq-split" if recorded.get("cp_strategy") == "zigzag" else "round-robin-split"


def _dsa_backend(recorded: dict[str, Any], phase: str) -> str:
    for family in ("dsa", "nsa"):
        value = recorded.get(f"{family}_{phase}_backend")
        if value:
            return str(value)
    return "flashmla_kv"


def _parallel_names(context: Any) -> frozenset[str]:
    names = getattr(context, "_PARALLEL_FIELDS", None)
    if names is None:
        lister: Callable[[], Any] | None = getattr(context, "_parallel_fields", None)
        names = lister() if lister is not None else ()
    return frozenset(names)


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
