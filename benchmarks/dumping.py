"""SGLang's own dumper at the hooked functions, writing the fields that padtrace records.

Used as its documentation says: `dumper.dump(name, value)` where something is to be seen, one file
a value. To be kind to it, an event is one dump of a dictionary rather than a dump per field, and
nothing is printed to the console.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from padtrace.recording import schema

Around = Callable[..., Any]

_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch."
_DSA = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend."
_GRAPH = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph"
)
_LAUNCH = "sgl_kernel.flash_mla."

_SNAPSHOT = [(column.name, column.name.removesuffix(".rows")) for column in schema.SNAPSHOT.columns]
_PLAN = [
    (column.name, column.name.removesuffix(".rows"))
    for column in schema.EVENT_TABLES["plan"].columns
    if column.unit != "name"
]
_SYNC = ("global_num_tokens", "global_num_tokens_for_logprob")


class DumperHooks:
    """AROUND hooks that dump; one per function that padtrace makes an event of."""

    def __init__(self, folder: Path, targets: set[str]) -> None:
        """
        Args:
            targets: the functions that can be hooked; others are left out.
        """
        from sglang.srt.debug_utils.dumper import DumperConfig, _Dumper

        config = DumperConfig(
            enable=True, dir=str(folder), exp_name="bench", enable_output_console=False
        )
        self._dumper: Any = _Dumper(config=config)
        self.every_launch = True
        self._launched = False
        all_hooks: dict[str, Around] = {
            _BATCH + "init_new": self._init_new,
            _BATCH + "init_mlp_sync_metadata": self._sync,
            _BATCH + "mark_forward_metadata_ready": self._ready,
            _BATCH + "prepare_mlp_sync_batch": self._pad,
            _BATCH + "post_forward_mlp_sync_batch": self._unpad,
            _DSA + "init_forward_metadata": self._plan,
            _GRAPH: self._graph,
            _FORWARD: self._forward,
            _LAUNCH + "flash_mla_with_kvcache": self._launch,
            _LAUNCH + "get_mla_metadata": self._metadata,
        }
        self.hooks = {name: hook for name, hook in all_hooks.items() if name in targets}

    def _dump(self, name: str, value: dict[str, Any]) -> None:
        self._dumper.dump(name, value)

    def _init_new(self, original: Around, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(cls, batch, *args, **kwargs)
        self._dump("batch", _snapshot(result))
        return result

    def _sync(self, original: Around, batch: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        before = {name: list(getattr(schedule, name)) for name in _SYNC}
        result = original(batch, schedule, *args, **kwargs)
        after = {
            "counts_after": batch.global_num_tokens_cpu,
            "logprob_counts_after": batch.global_num_tokens_for_logprob_cpu,
            "original_counts": batch.original_global_num_tokens_cpu,
        }
        self._dump("sync", {**before, **after})
        return result

    def _ready(self, original: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(batch, *args, **kwargs)
        planned = batch.forward_metadata_planned_bs, batch.forward_metadata_planned_num_tokens
        self._dump("ready", {"planned": planned})
        return result

    def _pad(self, original: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        entry = _snapshot(batch)
        result = original(batch, *args, **kwargs)
        self._dump("pad", {"entry": entry, "exit": _snapshot(batch)})
        return result

    def _unpad(self, original: Around, batch: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        entry, before = _snapshot(batch), _read(output.next_token_logits)
        result = original(batch, output, *args, **kwargs)
        after = _read(output.next_token_logits)
        self._dump("unpad", {"entry": entry, "exit": _snapshot(batch), "logits": (before, after)})
        return result

    def _plan(self, original: Around, backend: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        entry = _snapshot(batch)
        result = original(backend, batch, *args, **kwargs)
        metadata = backend.forward_metadata
        own = {name: _read(getattr(metadata, attribute, None)) for name, attribute in _PLAN}
        own["num_splits.rows"] = _read(metadata.flashmla_metadata.num_splits)
        self._dump("plan", {"entry": entry, **own})
        return result

    def _graph(self, original: Around, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        entry = _snapshot(batch)
        verdict = original(runner, batch, *args, **kwargs)
        own = {"captured_bs": list(runner.capture_bs), "max_bs": runner.max_bs, "verdict": verdict}
        self._dump("graph", {"entry": entry, **own})
        return verdict

    def _forward(self, original: Around, runner: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        self._launched = False
        entry = _snapshot(batch)
        result = original(runner, batch, *args, **kw)
        self._dump("forward", {"entry": entry, "can_run_graph": result.can_run_graph})
        self._dumper._state.step += 1  # what dumper.step() does besides printing
        return result

    def _launch(self, original: Around, **launch: Any) -> Any:
        if self.every_launch or not self._launched:
            self._launched = True
            self._dump("launch", {name: _shape(value) for name, value in launch.items()})
        return original(**launch)

    def _metadata(self, original: Around, cache_seqlens: Any, **others: Any) -> Any:
        self._dump("metadata", {"cache_seqlens": _shape(cache_seqlens)})
        return original(cache_seqlens=cache_seqlens, **others)


def _snapshot(batch: Any) -> dict[str, Any]:
    spec = batch.spec_info
    return {
        name: _read(
            getattr(spec, attribute.removeprefix("spec_info."), None)
            if attribute.startswith("spec_info.")
            else getattr(batch, attribute, None)
        )
        for name, attribute in _SNAPSHOT
    }


def _read(value: Any) -> Any:
    """Rows of a tensor, a list as it is, the name of an enum or class."""
    if value is None or isinstance(value, (int, list)):
        return value
    shape = getattr(value, "shape", None)
    return tuple(shape) if shape is not None else type(value).__name__


def _shape(value: Any) -> Any:
    shape = getattr(value, "shape", None)
    return value if shape is None else (tuple(shape), str(value.dtype))
