"""The model configuration as SGLang reads it: recorded facts behind a strict front."""

from __future__ import annotations

from typing import Any

from padtrace.recording.absent import NOT_RECORDED
from padtrace.recording.facts import WorkerFacts
from padtrace.replay.worker.standins import StandIn

# What a made recording, or a live one of a model without these, plans with. Row counts do not
# depend on any of them.
_DEFAULTS: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "context_len": 163_840,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
}


def model_values(facts: WorkerFacts) -> dict[str, Any]:
    """The recorded subset, completed by the defaults above."""
    unknown = (None, NOT_RECORDED)
    return {**_DEFAULTS, **{k: v for k, v in facts.model_config.items() if v not in unknown}}


def strict_model_config(facts: WorkerFacts) -> StandIn:
    """What SGLang gets as `model_runner.model_config`.

    `hf_config` is a real `PretrainedConfig`, since SGLang asks it questions of its own.
    """
    from transformers import PretrainedConfig

    values = model_values(facts)
    hf_values = {
        name: value for name, value in values.items() if name not in ("context_len", "is_hybrid")
    }
    hf_config = PretrainedConfig(**hf_values)
    hf_config.architectures = list(values["architectures"])
    names = (
        "context_len",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
    )
    return StandIn(
        "model_config",
        {
            "hf_config": hf_config,
            "hf_text_config": hf_config,
            "linear_attn_registry_result": None,
            **{name: values[name] for name in names},
        },
        absent=("linear_attn_config",),
    )
