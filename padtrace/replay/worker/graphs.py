"""Runs the selection code of the CUDA-graph runners, up to the bucket.

A runner decides twice: whether a captured graph fits (`can_run_graph`), and which one to replay
(`load_batch`, `replay` or `execute`). Both are SGLang's own methods on an object of the runner's
class made without its constructor; the second is stopped once it has chosen.
"""

from __future__ import annotations

import bisect
import inspect
import math
from collections.abc import Callable
from typing import Any

from padtrace.recording.facts import Facts, WorkerFacts
from padtrace.recording.model import Value
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.events import RecordedEvent
from padtrace.replay.worker.obstacles import import_or_none
from padtrace.replay.worker.provenance import Traced
from padtrace.replay.worker.standins import StandIn, not_held

# Kind of runner: (module, class) as releases call them.
_CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "decode": (
        ("model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner"),
        ("model_executor.cuda_graph_runner", "CudaGraphRunner"),
    ),
    "eagle_draft": (("speculative.eagle_draft_cuda_graph_runner", "EAGLEDraftCudaGraphRunner"),),
    "eagle_draft_extend": (
        ("speculative.eagle_draft_extend_cuda_graph_runner", "EAGLEDraftExtendCudaGraphRunner"),
    ),
}
_JUDGES = ("can_run_graph", "can_run")
_SIZERS = {
    "decode": ("load_batch", "replay_prepare"),
    "eagle_draft": ("execute", "replay"),
    "eagle_draft_extend": ("execute", "replay"),
}
# What these resolve (streams, adapters, hidden-state modes) has no part in the bucket.
_WITHOUT_EFFECT = (
    "_resolve_lora_variant",
    "_resolve_dsa_variant",
    "_resolve_attention_variant",
    "_sampling_variant",
    "_make_graph_key",
    "recapture_if_needed",
    "_validate_capture_hidden_mode",
)


class _Chosen(Exception):
    """The runner has chosen its bucket; nothing after that is run."""


class _Limit(Traced):
    """The largest captured batch size; remembers what it was compared with.

    Python asks the right-hand side first only if its class derives from the left one's, and the
    left one may be a `Traced`.
    """

    asked: list[int]

    def __ge__(self, other: Any) -> bool:
        self.asked.append(other)
        return bool(int(self) >= other)


class GraphJudge:
    """The graph runners of one process, without their captured graphs."""

    def __init__(self, capabilities: Capabilities, facts: Facts, server_args: Any) -> None:
        self._capabilities = capabilities
        self._facts = facts
        self._server_args = server_args
        self._made: dict[str, Any] = {}

    def unable(self, event: RecordedEvent, batch: Any) -> str | None:
        """Why an event cannot be replayed, or None."""
        runner = event.text("runner") or ""
        if _kind(runner) is None:
            return f"graph: {runner or 'an unnamed runner'} is not replayed"
        if event.integer("num_tokens_per_bs") is None or not event.vector("captured_bs"):
            return "graph: width or captured sizes were not observed"
        judges = event.text("function") in _JUDGES
        if not judges and getattr(batch, "forward_metadata_ready", False):
            return "graph: the batch was planned before, and the runner reuses that bucket"
        return None

    def judge(self, event: RecordedEvent, batch: Any) -> dict[str, Value]:
        """Run one of the two decisions; returns the columns of the graph event."""
        kind = _kind(event.text("runner") or "")
        assert kind is not None
        function = event.text("function") or ""
        runner = self._runner(kind, event)
        if getattr(batch, "capture_hidden_mode", 0) is None:
            # Runners capture again where the mode differs; it has no part in the bucket.
            batch.capture_hidden_mode = self._hidden_mode("NULL")
        values: dict[str, Value] = {
            name: event[name]
            for name in ("runner", "algorithm", "num_tokens_per_bs", "captured_bs", "max_bs")
        }
        values["raw_bs"] = int(batch.batch_size)
        values["function"] = function
        if function == "_max_dp_batch_size":
            values["bucket_argument"] = int(runner._max_dp_batch_size(batch))
        elif function in _JUDGES:
            name = self._name(runner, *_JUDGES)
            verdict = bool(getattr(runner, name)(batch))
            asked = runner.max_bs.asked
            values.update(
                {
                    "function": name,
                    "verdict": int(verdict),
                    "bucket_argument": _whole(asked[-1]) if asked else None,
                }
            )
        else:
            values.update(self._size(kind, runner, batch))
        return values

    def _size(self, kind: str, runner: Any, batch: Any) -> dict[str, Value]:
        name = self._name(runner, *_SIZERS[kind])
        method = getattr(runner, name)
        extra = [None] * (len(_required(method)) - 1)
        try:
            method(batch, *extra)
        except _Chosen as chosen:
            argument, bucket = chosen.args
            return {"function": name, "bucket_argument": _whole(argument), "bucket": bucket}
        raise self._capabilities.missing(
            "graph sizing", f"a bucket choice by _pad_to_bucket or bisect in {name}"
        )

    def _runner(self, kind: str, event: RecordedEvent) -> Any:
        runner = object.__new__(self._class(kind))
        width = event.integer("num_tokens_per_bs")
        captured = event.vector("captured_bs") or []
        limit = _Limit(event.integer("max_bs") or max(captured))
        limit.asked = []
        worker = event.text("worker") or "target"
        runner.__dict__.update(
            {
                "max_bs": limit,
                "capture_bs": list(captured),
                "captured_req_width": width,
                "num_tokens_per_bs": width,
                "disable_padding": False,
                "enable_pdmux": False,
                "is_encoder_decoder": False,
                "enable_two_batch_overlap": False,
                "ragged_verify_mode": False,
                "dllm_uses_input_embeds": False,
                "buffers": None,
                "graphs": {},
                "capture_hidden_mode": self._hidden_mode("NULL"),
                "deepep_adapter": StandIn("deepep_adapter", {"replay": lambda: None}),
                "model_runner": self._model_runner(event, worker),
                "dllm_input_preparation": None,
                **self._requirements(),
            }
        )
        return runner

    def _model_runner(self, event: RecordedEvent, worker: str) -> StandIn:
        algorithm = event.text("algorithm") or "NONE"
        module = self._capabilities.module("graph sizing", "speculative.spec_info")
        kind = self._capabilities.attribute("graph sizing", module, "SpeculativeAlgorithm")
        found = kind.from_string(None if algorithm == "NONE" else algorithm)
        facts = self._facts.workers.get(worker) or WorkerFacts()
        return StandIn(
            "model_runner",
            {
                "spec_algorithm": found,
                "is_draft_worker": worker == "draft",
                "server_args": self._server_args,
                "page_size": facts.page_size,
            },
        )

    def _requirements(self) -> dict[str, bool]:
        """Whether sizes are chosen from the counts of all ranks: SGLang's own answers."""
        module = self._capabilities.module("graph sizing", "utils.common", "utils")
        answers: dict[str, bool] = {}
        for name in ("require_mlp_tp_gather", "require_gathered_buffer", "require_mlp_sync"):
            function = self._capabilities.attribute("graph sizing", module, name)
            answers[name] = bool(function(*[self._server_args] * len(_required(function))))
        return answers

    def _class(self, kind: str) -> Any:
        if kind not in self._made:
            self._made[kind] = self._derive(kind)
        return self._made[kind]

    def _derive(self, kind: str) -> Any:
        """A subclass that stops at the bucket and refuses attributes it was not given."""
        for module_name, class_name in _CLASSES[kind]:
            module = import_or_none(f"sglang.srt.{module_name}")
            if module is not None and hasattr(module, class_name):
                break
        else:
            looked = " or ".join(f"{module}.{name}" for module, name in _CLASSES[kind])
            raise self._capabilities.missing(f"graph runner {kind}", looked)
        base = getattr(module, class_name)
        members: dict[str, Any] = {
            name: _no_effect for name in _WITHOUT_EFFECT if hasattr(base, name)
        }
        members["__getattr__"] = _refuse
        if hasattr(base, "_pad_to_bucket"):
            members["_pad_to_bucket"] = staticmethod(_stop_at(base._pad_to_bucket))
        else:
            stand_in = StandIn("bisect", {"bisect_left": _bisect_and_stop})
            module.bisect = stand_in  # type: ignore[attr-defined]
        return type(f"Replayed{class_name}", (base,), members)

    def _hidden_mode(self, name: str) -> Any:
        modes = self._capabilities.attribute(
            "graph sizing", self._capabilities.batch_module, "CaptureHiddenMode"
        )
        return modes[name]

    def _name(self, runner: Any, *names: str) -> str:
        for name in names:
            if hasattr(type(runner), name):
                return name
        raise self._capabilities.missing("graph sizing", " or ".join(names))


def _kind(runner: str) -> str | None:
    if runner in _CLASSES:
        return runner
    for kind, classes in _CLASSES.items():
        if any(runner == class_name for _, class_name in classes):
            return kind
    return None


def _required(function: Callable[..., Any]) -> list[str]:
    """Positional parameters that must be given."""
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _refuse(runner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise not_held(f"{type(runner).__name__.removeprefix('Replayed')}.{name}")


def _no_effect(*_: Any, **__: Any) -> None:
    return None


def _stop_at(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def _pad_to_bucket(raw_size: Any, buckets: Any) -> Any:
        raise _Chosen(raw_size, int(choose(raw_size, buckets)))

    return _pad_to_bucket


def _bisect_and_stop(buckets: list[int], wanted: Any) -> int:
    index = bisect.bisect_left(buckets, wanted)
    if index >= len(buckets):
        return index
    raise _Chosen(wanted, int(buckets[index]))


def _whole(value: float) -> int:
    """A size as an integer; a fraction of a request takes the bucket of the next whole one."""
    return math.ceil(value)
