"""The model runner that the pad is given: strict, with what padding reads and no more."""

from __future__ import annotations

from typing import Any

from padtrace.recording.facts import Facts, WorkerFacts
from padtrace.replay.worker.model_config import strict_model_config
from padtrace.replay.worker.obstacles import import_or_none
from padtrace.replay.worker.standins import StandIn


def padding_runner(facts: Facts, worker: str, server_args: Any) -> StandIn:
    """`model_runner` of `prepare_mlp_sync_batch` and `_pad_inputs_to_size`."""
    worker_facts = facts.workers.get(worker) or facts.workers.get("target") or WorkerFacts()
    fill = 1 if worker_facts.seq_len_fill_value is None else worker_facts.seq_len_fill_value
    backend = StandIn(
        "attn_backend",
        {
            "get_cuda_graph_seq_len_fill_value": lambda: fill,
            "get_cpu_graph_seq_len_fill_value": lambda: fill,
            # The base class of the backends answers None: no row switch in late layers.
            "late_layer_num_tokens": lambda batch: None,
        },
    )
    return StandIn(
        "model_runner",
        {
            "attn_backend": backend,
            "is_draft_worker": worker == "draft",
            "mambaish_config": None,
            "model_config": strict_model_config(worker_facts),
            "server_args": server_args,
            "attn_tp_sequence_sharded": _sequence_sharded,
        },
        absent=("enable_elastic_ep",),
    )


def _sequence_sharded(num_tokens: int) -> bool:
    """What the real runner answers: whether the release gathers buffers."""
    utils = import_or_none("sglang.srt.utils.common")
    gathered = getattr(utils, "require_gathered_buffer", None)
    return bool(gathered()) if gathered is not None else False
