"""SGLang's own runners and draft worker, made without their constructors and strict.

`ModelRunner`, `EagleDraftWorker` and `EagerRunner` are the release's classes with the release's
methods. What a constructor would load from a model and a card is given here instead: each
attribute has one row in a table that says where its value comes from. Whatever else SGLang reads
is refused with the line that reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from padtrace.errors import BadRecordingError
from padtrace.recording.facts import Facts, WorkerFacts
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.context import Topology
from padtrace.replay.worker.model import Expectations, OneLayerModel
from padtrace.replay.worker.model_config import model_values, strict_model_config
from padtrace.replay.worker.not_driven import NotDrivenError
from padtrace.replay.worker.process_groups import ProcessGroups
from padtrace.replay.worker.standins import StandIn, not_held

_PAGE = 64
_KV_BYTES = 656
_TABLE_ROWS = 1
_KV_SLOTS = 64
# Room of the eager runner's buffers; SGLang sizes them by what a server can run at once.
_MAX_REQUESTS = 256
_MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Given:
    """One attribute: its value, and where that comes from.

    Attributes:
        unless: recorded server arguments that would make it something else; where one of them is
            set, the forward is not driven.
    """

    name: str
    value: Callable[[Runners], Any]
    source: str
    unless: tuple[str, ...] = ()


def _none(name: str, source: str, *unless: str) -> Given:
    return Given(name, lambda _: None, source, unless)


def _false(name: str, source: str, *unless: str) -> Given:
    return Given(name, lambda _: False, source, unless)


# Of a ModelRunner, beside pools, configuration and model, which `Runners` makes.
_RUNNER = (
    Given("ps", lambda r: r.parallel_state(), "recorded sizes and ranks"),
    Given("tp_size", lambda r: r.facts.parallel.tp_size, "recorded"),
    Given("dp_size", lambda r: r.facts.parallel.attn_dp_size, "recorded"),
    Given("attn_cp_size", lambda r: r.facts.parallel.attn_cp_size, "recorded"),
    Given("pp_size", lambda r: 1, "a server of one pipeline stage"),
    Given("dcp_size", lambda r: 1, "server argument", ("dcp_size>1",)),
    Given("pp_group", lambda r: r.groups.pp, "recorded sizes"),
    Given("tp_group", lambda r: r.groups.tp, "recorded sizes"),
    Given("server_args", lambda r: r.server_args, "recorded arguments, published"),
    Given("spec_algorithm", lambda r: r.algorithm(), "server argument"),
    Given("hidden_size", lambda r: int(r.values["hidden_size"]), "recorded model configuration"),
    Given("dtype", lambda r: torch.bfloat16, "no row count depends on it"),
    Given("gpu_id", lambda r: 0, "names a device in a profile's span"),
    Given("forward_pass_id", lambda r: 0, "counts forwards for a profile's span"),
    Given("is_generation", lambda r: True, "server argument", ("is_embedding",)),
    Given("use_mla_backend", lambda r: True, "the DSA backend is an MLA backend"),
    Given("max_running_requests", lambda r: _MAX_REQUESTS, "sizes buffers alone"),
    Given("max_total_num_tokens", lambda r: _MAX_TOKENS, "sizes buffers alone"),
    Given("kernel_warmed_up", lambda r: True, "a warm-up runs kernels"),
    Given("_kernel_warmed_up", lambda r: True, "a warm-up runs kernels"),
    _false("support_pp", "a server of one pipeline stage"),
    _false("enable_elastic_ep", "server argument", "elastic_ep_backend", "enable_elastic_ep"),
    _none("decode_cuda_graph_runner", "this forward ran eagerly"),
    _none("prefill_cuda_graph_runner", "this forward ran eagerly"),
    _none("graph_runner", "this forward ran eagerly"),
    _none("piecewise_cuda_graph_runner", "this forward ran eagerly"),
    _none("msprobe_debugger", "server argument", "msprobe_dump_config"),
    _none("canary_manager", "server argument", "enable_kv_canary", "kv_canary"),
    _none("eplb_manager", "server argument", "enable_eplb"),
    _none("expert_location_updater", "server argument", "enable_eplb"),
    _none("device_timer", "server argument", "enable_forward_pass_metrics_timer"),
    _none("lora_manager", "server argument", "enable_lora"),
    _none("ngram_embedding_manager", "server argument", "enable_ngram_embedding"),
    _none("dllm_config", "server argument", "dllm_algorithm"),
    _none("hisparse_coordinator", "server argument", "enable_hisparse"),
    _none("draft_attn_backend", "its draft worker sets it"),
    _none("draft_attention_backend", "its draft worker sets it"),
    _none("attention_layers", "read by graph runners alone"),
    _none("num_tokens_hint", "read by graph runners alone"),
    _none("forward_stream", "there is no stream on a CPU"),
    _none("mambaish_config", "a DSA model has no Mamba layer"),
)  # fmt: skip

# How arguments say that they are off, besides being false or None.
_OFF = ("none", "off", "auto")

# Probed for with a default; a server without the feature lacks them too.
_RUNNER_LACKS = frozenset({"elastic_ep_state"})

_DRAFT = (
    Given("device", lambda r: "cpu", "every tensor is on the CPU"),
    Given("server_args", lambda r: r.server_args, "recorded arguments, published"),
    Given("draft_runner", lambda r: r.runner("draft"), "recorded facts of the draft"),
    Given("speculative_algorithm", lambda r: r.algorithm() or r.eagle(), "server argument"),
    Given("req_to_token_pool", lambda r: r.runner("draft").req_to_token_pool, "recorded shape"),
    Given("target_worker", lambda r: r.target_worker(), "its model runner alone is read"),
    Given("draft_tp_context", lambda r: contextlib.nullcontext, "switches groups, none is called"),
    Given("plan_stream_ctx", lambda r: contextlib.nullcontext(), "there is no stream on a CPU"),
    _none("plan_stream", "there is no stream on a CPU"),
    _none("hot_token_id", "server argument", "speculative_token_map"),
    _none("cuda_graph_runner", "this forward ran eagerly"),
    _none("cuda_graph_runner_for_draft_extend", "this forward ran eagerly"),
    _none("dsa_extend_topk_buf", "made when first needed"),
    _none("tree_mask_mode", "of the tree, which is not built"),
    _none("token_to_kv_pool_allocator", "nothing is allocated"),
    _none("has_draft_model_hidden", "set when first needed"),
    _none("_eagle3", "set when first needed"),
)  # fmt: skip


class Runners:
    """The runners of one process, each made when first needed.

    Attributes:
        expectations: what the model of the forward that runs hands on.
    """

    def __init__(
        self, capabilities: Capabilities, topology: Topology, expectations: Expectations
    ) -> None:
        self._capabilities = capabilities
        self.facts: Facts = topology.facts
        self.server_args: Any = topology.server_args
        self.groups: ProcessGroups = topology.groups
        self.expectations = expectations
        self.values: dict[str, Any] = model_values(topology.target())
        self._runners: dict[str, Any] = {}
        self._drafts: dict[tuple[int, int, int], Any] = {}
        if self.facts.parallel.pp_size > 1:
            raise NotDrivenError("pipeline parallelism")

    def of_worker(self, worker: str) -> WorkerFacts:
        found = self.facts.workers.get(worker) or self.facts.workers.get("target")
        return found or WorkerFacts()

    def runner(self, worker: str) -> Any:
        """The ModelRunner of "target" or "draft".

        Raises:
            NotDrivenError: its backend, or a feature of the server, is not rebuilt.
        """
        if worker not in self._runners:
            self._runners[worker] = self._make_runner(worker)
        return self._runners[worker]

    def draft_worker(self, steps: int, topk: int, width: int) -> Any:
        """The EagleDraftWorker; the draft's runner gets its attention backends as a server's does.

        Args:
            steps: `speculative_num_steps`.
            topk: `speculative_eagle_topk`.
            width: `speculative_num_draft_tokens`.
        """
        key = (steps, topk, width)
        if key not in self._drafts:
            self._drafts[key] = self._make_draft(steps, topk, width)
        return self._drafts[key]

    def algorithm(self) -> Any:
        """The release's SpeculativeAlgorithm that the server was started with."""
        name = self.facts.server_args.get("speculative_algorithm")
        known = name if isinstance(name, str) and name != "NONE" else None
        return self._capabilities.spec_algorithm.from_string(known)

    def eagle(self) -> Any:
        return self._capabilities.spec_algorithm.from_string("EAGLE")

    def parallel_state(self) -> StandIn:
        parallel = self.facts.parallel
        return StandIn(
            "ps",
            {
                "attn_dcp_size": 1,
                "attn_dp_size": parallel.attn_dp_size,
                "dp_size": parallel.attn_dp_size,
                "tp_size": parallel.tp_size,
                "tp_rank": parallel.tp_rank,
                "pp_size": 1,
            },
        )

    def target_worker(self) -> StandIn:
        return StandIn("target worker", {"model_runner": self.runner("target")})

    def _make_runner(self, worker: str) -> Any:
        capabilities = self._capabilities
        facts = self.of_worker(worker)
        if facts.backend is not None and "SparseAttn" not in facts.backend:
            raise NotDrivenError(f"{facts.backend} is not rebuilt")
        runner = object.__new__(_strict(capabilities.runner_class, _RUNNER_LACKS))
        held = runner.__dict__
        held.update(self._pools(facts), is_draft_worker=worker == "draft", device="cpu")
        self._give(runner, _RUNNER)
        module = capabilities.runner_module
        if hasattr(module, "_UNSET"):
            held["_linear_attn_registry_cache"] = module._UNSET
        held["kv_index_translator"] = StandIn(
            "kv_index_translator", {"is_translating": False, "plan": lambda **_: None}
        )
        runner.attn_backend = self._backend(runner)
        runner.model = OneLayerModel(
            capabilities,
            model_values(facts),
            self.facts.parallel.attn_tp_size,
            (self.facts.parallel.attn_cp_size, self.facts.parallel.attn_cp_rank),
            self.groups.pp,
            self.expectations,
        )
        if capabilities.eager_runner_class is not None:
            kind = _strict(capabilities.eager_runner_class, frozenset())
            held["eager_runner"] = eager = object.__new__(kind)
            kind.__init__(eager, runner)
        return runner

    def _backend(self, runner: Any) -> Any:
        backend = self._capabilities.dsa_class(runner)
        fill = "get_cpu_graph_seq_len_fill_value"
        if not hasattr(backend, fill):
            # A CPU engine asks the twin; the backend has the value of its kernels alone.
            backend.get_cpu_graph_seq_len_fill_value = backend.get_cuda_graph_seq_len_fill_value
        return backend

    def _pools(self, facts: WorkerFacts) -> dict[str, Any]:
        dtype = _dtype(facts.kv_cache_dtype)
        config = strict_model_config(facts)
        config.__dict__.update(
            is_encoder_decoder=bool(facts.model_config.get("is_encoder_decoder")),
            model_is_mrope=bool(facts.model_config.get("model_is_mrope")),
            vocab_size=4,
            num_hidden_layers=1,
        )
        columns = facts.req_to_token_shape[1] if facts.req_to_token_shape else 0
        table = torch.zeros(
            (_TABLE_ROWS, max(columns, config.context_len + 1024)), dtype=torch.int32
        )
        width = facts.kv_cache_dim or _KV_BYTES
        cache = torch.zeros((_KV_SLOTS, 1, width), dtype=torch.uint8).view(torch.float8_e4m3fn)
        stores_fp8 = dtype == torch.float8_e4m3fn
        pool = {
            "kv_cache_dim": width,
            "dsa_kv_cache_store_fp8": stores_fp8,
            "nsa_kv_cache_store_fp8": stores_fp8,
            "dtype": dtype,
            "page_size": facts.page_size or _PAGE,
            "size": 1 << 30,
            "start_layer": 0,
            "get_key_buffer": lambda layer: cache,
            "set_mla_kv_buffer": _write_kv,
            # Copies of a prefix's last page for each branch of a draft tree: values, not rows.
            "move_kv_cache": lambda to, source: None,
        }
        return {
            "token_to_kv_pool": StandIn("token_to_kv_pool", pool, absent=("kv_shard",)),
            "req_to_token_pool": StandIn(
                "req_to_token_pool", {"req_to_token": table, "size": 1 << 16}
            ),
            "page_size": facts.page_size or _PAGE,
            "kv_cache_dtype": dtype,
            "model_config": config,
        }

    def _make_draft(self, steps: int, topk: int, width: int) -> Any:
        kind = _strict(self._capabilities.draft_worker_class, frozenset())
        worker = object.__new__(kind)
        self._give(worker, _DRAFT)
        worker.__dict__.update(
            speculative_num_steps=steps, topk=topk, speculative_num_draft_tokens=width
        )
        for prepare in ("_rebuild_topk1_chain_buffers", "_init_dsa_index_share_state"):
            if hasattr(kind, prepare):
                getattr(worker, prepare)()
        worker.init_attention_backend()
        extend = worker.__dict__.get("draft_extend_attn_backend")
        for backend in (extend, *getattr(worker.draft_attn_backend, "attn_backends", ())):
            fill = "get_cpu_graph_seq_len_fill_value"
            if backend is not None and not hasattr(backend, fill):
                setattr(backend, fill, backend.get_cuda_graph_seq_len_fill_value)
        return worker

    def _give(self, target: Any, table: tuple[Given, ...]) -> None:
        arguments = self.facts.server_args
        for given in table:
            for argument in given.unless:
                name, _, least = argument.partition(">")
                value = arguments.get(name)
                if value and value not in _OFF and (not least or int(value) > int(least)):
                    raise NotDrivenError(f"the server runs with {name}={value}")
            target.__dict__[given.name] = given.value(self)


@cache
def _strict(base: Any, lacks: frozenset[str]) -> Any:
    """A subclass whose objects refuse what they were not given."""

    def refuse(self: Any, name: str) -> Any:
        if name.startswith("__") or name in lacks:
            raise AttributeError(name)
        raise not_held(f"{base.__name__}.{name}")

    return type(f"Driven{base.__name__}", (base,), {"__getattr__": refuse})


def _write_kv(layer: Any, loc: torch.Tensor, k: torch.Tensor, k_rope: Any, *_: Any) -> None:
    """Keys are written row by row to their places.

    Raises:
        RuntimeError: there are fewer rows than places: the kernel would read past the end.
    """
    if k.shape[0] < loc.shape[0]:
        raise RuntimeError(
            f"set_mla_kv_buffer: {loc.shape[0]} locations but {k.shape[0]} rows of keys"
        )


def _dtype(name: str | None) -> torch.dtype:
    found = getattr(torch, (name or "torch.float8_e4m3fn").removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise BadRecordingError(
            "the recording names a dtype that torch does not have", f"kv_cache_dtype is {name!a}"
        )
    return found
