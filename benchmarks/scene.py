"""The server side of the recorder's benchmark: real batches of a real SGLang, cheap functions.

Each batch of a pool goes once through SGLang's own functions (counts, plan, pad, unpad), and what
they did to the batch is kept. The functions that are hooked are then replaced by ones that only
put those results back. So the hooks meet the same objects, fields and changes as in a server,
while the functions under them cost next to nothing and do not hide what the hooks cost.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from workload import Layout, Planned, forwards

from padtrace.explore.case_input import read_case
from padtrace.explore.make import make, snapshot_before_padding
from padtrace.recording import schema
from padtrace.recording.absent import Absent
from padtrace.recording.facts import view
from padtrace.replay import releases

LAYERS = 61
# SGLang plans these before the pad, which is sglang#30296.
_PLANNED_BEFORE = ("draft", "draft_extend")
_DRAFTS = ("draft", "draft_extend")
_HEADS, _HEAD_DIM, _TOPK, _PAGE, _PAGES, _PAGE_BYTES = 64, 576, 2048, 64, 4321, 656
_CAPTURED = [1, 2, 4, 8, 12, 16, 24, 32]

# The parts of one forward, in the order in which the driver takes the time between them.
PARTS = (
    "step", "batch+sync", "plan", "ready", "forward begin", "graph", "pad", "late plan",
    "launches", "unpad", "forward end",
)  # fmt: skip


@dataclass(slots=True)
class Script:
    """What SGLang did to one batch: attributes that were other objects after each step."""

    kind: str
    early: bool  # planned before the pad
    made: dict[str, Any]
    schedule: Any
    sync: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    ready: dict[str, Any] = field(default_factory=dict)
    pad: dict[str, Any] = field(default_factory=dict)
    padded_to: tuple[int, int] = (0, 0)
    unpad: dict[str, Any] = field(default_factory=dict)
    # The same for the speculative input, which the pad edits in place.
    spec: Any = None
    spec_made: dict[str, Any] = field(default_factory=dict)
    spec_pad: dict[str, Any] = field(default_factory=dict)
    spec_unpad: dict[str, Any] = field(default_factory=dict)
    metadata: Any = None
    planned: Any = None
    launch: dict[str, Any] = field(default_factory=dict)
    logits: Any = None
    logits_before: dict[str, Any] = field(default_factory=dict)
    logits_after: dict[str, Any] = field(default_factory=dict)


def import_sglang(sglang: str) -> str:
    """Import the SGLang that `--sglang` means, as the replay worker does; returns its version."""
    from padtrace.replay.worker.obstacles import (
        prepare_environment,
        prepare_modules,
        prepare_torch,
    )

    release = releases.resolve(sglang, None, lambda text: print(text, file=sys.stderr))
    if release.root is not None:
        sys.path.insert(0, str(release.root))
    prepare_environment()
    prepare_torch()
    from padtrace.replay.worker.capabilities import import_release

    version = import_release()
    prepare_modules()
    return version


class Scene:
    """Makes scripts, and gives SGLang's classes cheap functions that follow them.

    Attributes:
        eagle: whether the server speculates; with it some batches are planned before the pad.
    """

    def __init__(self, release: str) -> None:
        from padtrace.replay.worker.capabilities import Capabilities
        from padtrace.replay.worker.leaves import Leaves

        self.eagle = True
        self.capabilities = Capabilities(release)
        self.batch_class = self.capabilities.batch_class
        self.backend_class = self.capabilities.dsa_class
        Leaves(self.capabilities, "cpu").install()
        self._spare_the_interpreter()

    def _spare_the_interpreter(self) -> None:
        """Give the one Triton kernel of planning a result of the right size.

        Interpreted it takes some 30 ms a batch; only the rows of what it makes are recorded.
        """
        import torch

        def seqlens_expand_triton(
            extend_seq_lens: Any, seq_lens: Any, total_len: int, max_q_len: int
        ) -> Any:
            return torch.ones(total_len, dtype=torch.int32)

        if hasattr(self.capabilities.dsa_module, "seqlens_expand_triton"):
            self.capabilities.dsa_module.seqlens_expand_triton = seqlens_expand_triton

    @contextmanager
    def rank(self, layout: Layout, rank: int, count: int) -> Iterator[list[Script]]:
        """`count` batches of one global rank, run through SGLang's functions.

        Inside the context SGLang's own topology and server arguments are those of the rank.
        """
        from padtrace.replay.worker.context import Topology

        planned = forwards(layout, rank // layout.attn_tp, count, eagle=self.eagle)
        facts = make([one.case for one in planned[:1]]).facts[0]
        facts["parallel"].update(tp_rank=rank, attn_tp_rank=rank % layout.attn_tp)
        with Topology(self.capabilities, view(facts)).active() as topology:
            # For the facts: the real arguments without the strict stand-in of the model.
            self._server_args = SimpleNamespace(
                **{k: v for k, v in vars(topology.server_args).items() if k != "model_config"}
            )
            rehearsal = _Rehearsal(self, topology)
            yield [rehearsal.script(one) for one in planned]

    def cheapen(self) -> None:
        """Replace SGLang's functions by cheap ones, for good."""
        from sglang.srt.managers import scheduler
        from sglang.srt.managers.scheduler_components import dp_attn
        from sglang.srt.model_executor import model_runner
        from sglang.srt.model_executor.runner import decode_cuda_graph_runner

        cls = self.batch_class
        cls.init_new = classmethod(_init_new)
        cls.init_mlp_sync_metadata = _init_mlp_sync_metadata
        cls.mark_forward_metadata_ready = _mark_forward_metadata_ready
        cls.prepare_mlp_sync_batch = _prepare_mlp_sync_batch
        cls._pad_inputs_to_size = _pad_inputs_to_size
        cls.post_forward_mlp_sync_batch = _post_forward_mlp_sync_batch
        self.backend_class.init_forward_metadata = _init_forward_metadata
        self.backend_class._compute_flashmla_metadata = _compute_flashmla_metadata
        kernels = sys.modules["sgl_kernel.flash_mla"]
        kernels.flash_mla_with_kvcache = _flash_mla_with_kvcache  # type: ignore[attr-defined]
        kernels.get_mla_metadata = _get_mla_metadata  # type: ignore[attr-defined]
        model_runner.ModelRunner.forward = _forward
        decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph = _can_run_graph
        scheduler.Scheduler.run_batch = _run_batch
        dp_attn.prepare_mlp_sync_batch_raw = _prepare_mlp_sync_batch_raw
        self.scheduler = object.__new__(scheduler.Scheduler)
        target, draft = self._runner(draft=False), self._runner(draft=True)
        self.runners = {
            **dict.fromkeys(("decode", "verify", "prefill"), target),
            **dict.fromkeys(_DRAFTS, draft),
        }

    def _runner(self, *, draft: bool) -> Any:
        """A model runner with what hooks and the cheap functions read of one."""
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        runner, graph = object.__new__(ModelRunner), object.__new__(DecodeCudaGraphRunner)
        graph.__dict__.update(
            model_runner=runner, capture_bs=_CAPTURED, max_bs=_CAPTURED[-1], captured_req_width=2
        )
        runner.__dict__.update(
            is_draft_worker=draft,
            spec_algorithm=SimpleNamespace(name="EAGLE"),
            server_args=self._server_args,
            attn_backend=object.__new__(self.backend_class),
            decode_cuda_graph_runner=graph,
            layers=LAYERS,
        )
        return runner

    def drive(self, script: Script, stamps: list[int], layers: int = LAYERS) -> None:
        """One forward of a server's step; `stamps` gets the time after each of PARTS."""
        from sglang.srt.managers.scheduler_components import dp_attn

        runner = self.runners[script.kind]
        runner.layers = layers
        runner.stamps = stamps
        now = time.perf_counter_ns
        stamps.append(now())
        dp_attn.prepare_mlp_sync_batch_raw(self.scheduler, script)
        self.scheduler.run_batch(script, runner, stamps)
        stamps.append(now())


# --- the cheap functions; names and parameters are SGLang's ---------------------------------------


def _prepare_mlp_sync_batch_raw(scheduler: Any, script: Script) -> None:
    return None


def _run_batch(self: Any, script: Script, runner: Any, stamps: list[int]) -> None:
    now = time.perf_counter_ns
    stamps.append(now())
    batch = _classes["batch"].init_new(script.schedule, runner)
    stamps.append(now())
    if script.early:
        runner.attn_backend.init_forward_metadata(batch)
        stamps.append(now())
        batch.mark_forward_metadata_ready()
    else:
        stamps.append(now())
    stamps.append(now())
    runner.forward(batch)


_classes: dict[str, Any] = {}


def _init_new(cls: Any, batch: Any, model_runner: Any) -> Any:
    made, script = object.__new__(cls), batch.script
    made.__dict__.update(script.made)
    script.spec.__dict__.update(script.spec_made)
    made.init_mlp_sync_metadata(batch, "cpu")
    return made


def _init_mlp_sync_metadata(self: Any, batch: Any, device: Any) -> None:
    self.__dict__.update(batch.script.sync)


def _mark_forward_metadata_ready(self: Any, replan_equivalent: bool = False) -> None:
    self.__dict__.update(self.script.ready)


def _forward(self: Any, forward_batch: Any) -> Any:
    now, stamps, script = time.perf_counter_ns, self.stamps, forward_batch.script
    stamps.append(now())
    self.decode_cuda_graph_runner.can_run_graph(forward_batch)
    stamps.append(now())
    forward_batch.prepare_mlp_sync_batch(self)
    stamps.append(now())
    if not script.early:
        self.attn_backend.init_forward_metadata(forward_batch)
    stamps.append(now())
    kernels: Any = sys.modules["sgl_kernel.flash_mla"]
    q, k_cache, lengths, width, tiles, splits, scale, indices, table, fp8 = script.launch.values()
    for _ in range(self.layers):
        # Written out as in SGLang: not every interpreter calls alike with ** and by names.
        kernels.flash_mla_with_kvcache(
            q=q, k_cache=k_cache, cache_seqlens=lengths, head_dim_v=width,
            tile_scheduler_metadata=tiles, num_splits=splits, softmax_scale=scale,
            indices=indices, block_table=table, is_fp8_kvcache=fp8,
        )  # fmt: skip
    stamps.append(now())
    script.logits.__dict__.update(script.logits_before)
    forward_batch.post_forward_mlp_sync_batch(script.logits)
    stamps.append(now())
    return _EAGER


_EAGER = SimpleNamespace(can_run_graph=False)


def _can_run_graph(self: Any, forward_batch: Any) -> bool:
    return False


def _prepare_mlp_sync_batch(self: Any, model_runner: Any) -> None:
    self._pad_inputs_to_size(model_runner, *self.script.padded_to)


def _pad_inputs_to_size(self: Any, model_runner: Any, num_tokens: int, bs: int) -> None:
    script = self.script
    self.__dict__.update(script.pad)
    script.spec.__dict__.update(script.spec_pad)


def _post_forward_mlp_sync_batch(self: Any, logits_output: Any) -> None:
    script = self.script
    self.__dict__.update(script.unpad)
    script.spec.__dict__.update(script.spec_unpad)
    logits_output.__dict__.update(script.logits_after)


def _init_forward_metadata(self: Any, forward_batch: Any) -> None:
    script = forward_batch.script
    self._compute_flashmla_metadata(cache_seqlens=script.planned, seq_len_q=1)
    forward_batch.__dict__.update(script.plan)
    self.forward_metadata = script.metadata


def _compute_flashmla_metadata(self: Any, cache_seqlens: Any, seq_len_q: int) -> Any:
    kernels: Any = sys.modules["sgl_kernel.flash_mla"]
    kernels.get_mla_metadata(cache_seqlens=cache_seqlens)
    return _made_metadata[id(cache_seqlens)]


_made_metadata: dict[int, Any] = {}


def _get_mla_metadata(cache_seqlens: Any) -> Any:
    made = _made_metadata[id(cache_seqlens)]
    return made.flashmla_metadata, made.num_splits


def _flash_mla_with_kvcache(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int,
    tile_scheduler_metadata: Any, num_splits: Any = None, softmax_scale: float | None = None,
    causal: bool = False, descale_q: Any = None, descale_k: Any = None,
    is_fp8_kvcache: bool = False, indices: Any = None,
) -> Any:  # fmt: skip
    return q


class _Rehearsal:
    """Runs batches of one rank through SGLang's real functions and keeps what they changed."""

    def __init__(self, scene: Scene, topology: Any) -> None:
        from padtrace.replay.worker.batches import BatchBuilder
        from padtrace.replay.worker.model import Expectations
        from padtrace.replay.worker.runner import Runners

        capabilities = scene.capabilities
        self._scene = scene
        self._capabilities = capabilities
        self._builder = BatchBuilder(capabilities)
        self._runners = Runners(capabilities, topology, Expectations())
        _classes["batch"] = scene.batch_class

    def script(self, planned: Planned) -> Script:
        case = read_case(planned.case, 0)
        unseen = dict.fromkeys(schema.SNAPSHOT.names(), Absent.NOT_OBSERVED)
        batch = self._builder.build({**unseen, **snapshot_before_padding(case)})
        counts = list(case.raw_counts)
        schedule = SimpleNamespace(
            global_num_tokens=counts,
            global_num_tokens_for_logprob=list(counts),
            draft_global_num_tokens=None,
            draft_global_num_tokens_for_logprob=None,
            can_run_dp_cuda_graph=True,
            can_run_decode_cuda_graph=True,
        )
        script = Script(planned.kind, self._is_early(planned), _as_made(batch), schedule)
        script.made["script"] = batch.script = script
        schedule.script = script
        script.spec = batch.spec_info or SimpleNamespace()
        script.spec_made = dict(script.spec.__dict__)
        script.sync = _changes(batch, lambda: batch.init_mlp_sync_metadata(schedule, "cpu"))
        if script.early:
            self._plan(script, batch)
            script.ready = _changes(batch, batch.mark_forward_metadata_ready)
        self._pad(script, batch)
        if not script.early:
            self._plan(script, batch)
        self._launch(script, batch)
        self._unpad(script, batch)
        return script

    def _is_early(self, planned: Planned) -> bool:
        return planned.kind in _PLANNED_BEFORE

    def _plan(self, script: Script, batch: Any) -> None:
        worker = "draft" if script.kind in _DRAFTS else "target"
        runner = self._runners.runner(worker)
        for name in ("req_to_token_pool", "token_to_kv_pool"):
            if hasattr(batch, name):
                setattr(batch, name, getattr(runner, name))
        script.plan = _changes(batch, lambda: runner.attn_backend.init_forward_metadata(batch))
        script.metadata = runner.attn_backend.forward_metadata
        script.planned = script.metadata.dsa_cache_seqlens_int32
        _made_metadata[id(script.planned)] = script.metadata.flashmla_metadata

    def _pad(self, script: Script, batch: Any) -> None:
        worker = "draft" if script.kind in _DRAFTS else "target"
        runner = self._runners.runner(worker)
        before = dict(script.spec.__dict__)
        script.pad = _changes(batch, lambda: batch.prepare_mlp_sync_batch(runner))
        script.spec_pad = _others(before, script.spec)
        script.padded_to = batch.input_ids.shape[0], batch.batch_size

    def _launch(self, script: Script, batch: Any) -> None:
        import torch

        one, rows = torch.zeros(1, dtype=torch.int32), batch.input_ids.shape[0]
        half = torch.zeros(1, dtype=torch.bfloat16)
        made = script.metadata.flashmla_metadata
        script.launch = {
            "q": half.expand(rows, 1, _HEADS, _HEAD_DIM),
            "k_cache": one.expand(_PAGES, _PAGE, 1, _PAGE_BYTES),
            "cache_seqlens": script.planned,
            "head_dim_v": 512,
            "tile_scheduler_metadata": made.flashmla_metadata,
            "num_splits": made.num_splits,
            "softmax_scale": 0.04,
            "indices": one.expand(rows, 1, _TOPK),
            "block_table": torch.empty((rows, 0), dtype=torch.int32),
            "is_fp8_kvcache": True,
        }

    def _unpad(self, script: Script, batch: Any) -> None:
        import torch

        # The logits of a prefill are those of its last tokens; only EAGLE asks for hidden states.
        rows = batch.batch_size if script.kind == "prefill" else batch.input_ids.shape[0]
        hidden = None if script.kind in ("prefill", "decode") else torch.zeros((rows, 1))
        output = self._capabilities.logits_class(
            next_token_logits=torch.zeros((rows, 1)), hidden_states=hidden
        )
        script.logits = output
        script.logits_before = dict(output.__dict__)
        before = dict(script.spec.__dict__)
        script.unpad = _changes(batch, lambda: batch.post_forward_mlp_sync_batch(output))
        script.spec_unpad = _others(before, script.spec)
        script.logits_after = dict(output.__dict__)


def _as_made(batch: Any) -> dict[str, Any]:
    """The attributes in the order in which the dataclass's own constructor sets them."""
    held = batch.__dict__
    ordered = {name: held[name] for name in type(batch).__dataclass_fields__ if name in held}
    return {**ordered, **held}


def _changes(batch: Any, run: Callable[[], Any]) -> dict[str, Any]:
    """The attributes that are other objects after `run`."""
    before = dict(batch.__dict__)
    run()
    return _others(before, batch)


def _others(before: dict[str, Any], after: Any) -> dict[str, Any]:
    missing = object()
    return {
        name: value
        for name, value in after.__dict__.items()
        if before.get(name, missing) is not value
    }
