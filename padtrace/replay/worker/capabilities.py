"""What a release of SGLang can do, found by looking, never by its version number."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import Any

from padtrace.errors import EnvironmentMissingError
from padtrace.replay.worker.obstacles import import_or_none
from padtrace.replay.worker.old_context_parallel import OldContextParallel

_SRT = "sglang.srt."


class Capabilities:
    """The functions of one release that a replay calls, each looked for once.

    A property raises `EnvironmentMissingError` naming the capability and the release where the
    release has nothing that serves.
    """

    def __init__(self, release: str) -> None:
        self.release = release

    def missing(self, capability: str, looked_for: str) -> EnvironmentMissingError:
        return EnvironmentMissingError(
            f"SGLang {self.release} lacks the capability '{capability}'",
            f"looked for {looked_for}",
            "replay on another release, or tell padtrace's maintainers what it is called now",
        )

    def module(self, capability: str, *names: str) -> ModuleType:
        for name in names:
            found = import_or_none(_SRT + name)
            if found is not None:
                return found
        raise self.missing(capability, " or ".join(_SRT + name for name in names))

    def attribute(self, capability: str, owner: Any, *names: str) -> Any:
        for name in names:
            if hasattr(owner, name):
                return getattr(owner, name)
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        raise self.missing(capability, " or ".join(f"{owner_name}.{name}" for name in names))

    @cached_property
    def batch_module(self) -> ModuleType:
        return self.module("forward batch", "model_executor.forward_batch_info")

    @cached_property
    def batch_class(self) -> Any:
        return self.attribute("forward batch", self.batch_module, "ForwardBatch")

    @cached_property
    def forward_mode(self) -> Any:
        return self.attribute("forward batch", self.batch_module, "ForwardMode")

    @cached_property
    def dp_module(self) -> ModuleType:
        return self.module("attention DP", "layers.dp_attention")

    @cached_property
    def padding_mode(self) -> Any:
        found = self.attribute("padding mode", self.dp_module, "DpPaddingMode")
        self.attribute("padding mode", found, "get_dp_padding_mode")
        return found

    @cached_property
    def pad(self) -> Callable[..., Any]:
        self.attribute("pad inputs", self.batch_class, "_pad_inputs_to_size")
        found: Callable[..., Any] = self.attribute(
            "pad", self.batch_class, "prepare_mlp_sync_batch"
        )
        return found

    @cached_property
    def unpad(self) -> Callable[..., Any]:
        found: Callable[..., Any] = self.attribute(
            "unpad", self.batch_class, "post_forward_mlp_sync_batch"
        )
        return found

    @cached_property
    def scale(self) -> Callable[[Any, Any, bool], str]:
        """Runs (batch, schedule batch, is draft worker); returns the function's name."""
        method = getattr(self.batch_class, "init_mlp_sync_metadata", None)
        if method is not None:
            return _scale_by_method(method)
        return self._scale_by_block()

    def _scale_source(self) -> str:
        """What `scale` runs, in words."""
        # Looking for it raises where nothing serves.
        _ = self.scale
        if hasattr(self.batch_class, "init_mlp_sync_metadata"):
            return "ForwardBatch.init_mlp_sync_metadata"
        return f"ForwardBatch.init_new, its block `if {_BLOCK_TEST}`"

    def _scale_by_block(self) -> Callable[[Any, Any, bool], str]:
        """The block of `init_new` that fills in the counts, cut out of SGLang's own source."""
        maker = self.attribute("spec scaling", self.batch_class, "init_new")
        tree = ast.parse(textwrap.dedent(inspect.getsource(maker)))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == _BLOCK_TEST:
                return _compile_block(node, maker, self.batch_module)
        raise self.missing(
            "spec scaling", f"ForwardBatch.init_mlp_sync_metadata or `if {_BLOCK_TEST}` in init_new"
        )

    @cached_property
    def lora_list_is_shared(self) -> bool:
        """Whether `init_new` hands the scheduler's own lora list on instead of a copy."""
        maker = self.attribute("forward batch", self.batch_class, "init_new")
        tree = ast.parse(textwrap.dedent(inspect.getsource(maker)))
        return any(
            isinstance(node, ast.keyword)
            and node.arg == "lora_ids"
            and isinstance(node.value, ast.Attribute)
            for node in ast.walk(tree)
        )

    @cached_property
    def logits_class(self) -> Any:
        module = self.module("logits", "layers.logits_processor")
        return self.attribute("logits", module, "LogitsProcessorOutput")

    @cached_property
    def dsa_utils(self) -> ModuleType:
        return self.module(
            "metadata padding", "layers.attention.dsa.utils", "layers.attention.nsa.utils"
        )

    @cached_property
    def pad_lengths(self) -> str:
        """Name of the function that pads the plan's lengths."""
        for name in ("pad_dsa_cache_seqlens", "pad_nsa_cache_seqlens"):
            if hasattr(self.dsa_utils, name):
                return name
        raise self.missing("metadata padding", "pad_dsa_cache_seqlens or pad_nsa_cache_seqlens")

    @cached_property
    def dsa_module(self) -> ModuleType:
        return self.module(
            "DSA backend", "layers.attention.dsa_backend", "layers.attention.nsa_backend"
        )

    @cached_property
    def dsa_class(self) -> Any:
        found = self.attribute(
            "DSA backend",
            self.dsa_module,
            "DeepseekSparseAttnBackend",
            "NativeSparseAttnBackend",
        )
        for method in ("init_forward_metadata", "_compute_flashmla_metadata"):
            self.attribute("DSA planning", found, method)
        return found

    @cached_property
    def radix_attention(self) -> Any:
        module = self.module("attention layer", "layers.radix_attention")
        return self.attribute("attention layer", module, "RadixAttention")

    @cached_property
    def attention_method(self) -> Callable[[Any, Any], Any] | None:
        """What chooses MLA or MHA for a DSA layer; None where a release knows MLA alone."""
        module = import_or_none(_SRT + "models.deepseek_common.attention_backend_handler")
        for name in ("handle_attention_dsa", "handle_attention_nsa"):
            if module is not None and hasattr(module, name):
                found: Callable[[Any, Any], Any] = getattr(module, name)
                return found
        return None

    @cached_property
    def old_context_parallel(self) -> OldContextParallel | None:
        return OldContextParallel.found(self.dsa_utils)

    @cached_property
    def runner_module(self) -> ModuleType:
        return self.module("model runner", "model_executor.model_runner")

    @cached_property
    def runner_class(self) -> Any:
        found = self.attribute("model runner", self.runner_module, "ModelRunner")
        self.attribute("model runner", found, "forward")
        return found

    @cached_property
    def eager_runner_class(self) -> Any:
        """EagerRunner; None where ModelRunner runs eager batches itself."""
        module = import_or_none(_SRT + "model_executor.runner.eager_runner")
        return None if module is None else self.attribute("eager runner", module, "EagerRunner")

    @cached_property
    def draft_worker_class(self) -> Any:
        module = self.module("EAGLE draft", "speculative.eagle_worker_v2")
        found = self.attribute("EAGLE draft", module, "EagleDraftWorker")
        for method in ("draft", "draft_forward", "_draft_extend_for_decode"):
            self.attribute("EAGLE draft", found, method)
        return found

    @cached_property
    def spec_algorithm(self) -> Any:
        module = self.module("speculative algorithm", "speculative.spec_info")
        return self.attribute("speculative algorithm", module, "SpeculativeAlgorithm")

    @cached_property
    def schedule_fields(self) -> frozenset[str]:
        """What the scheduler's batch has in this release."""
        module = self.module("scheduler's batch", "managers.schedule_batch")
        kind = self.attribute("scheduler's batch", module, "ScheduleBatch")
        return frozenset(getattr(kind, "__dataclass_fields__", ())) | frozenset(vars(kind))

    @cached_property
    def capture_hidden_mode(self) -> Any:
        return self.attribute("hidden states", self.batch_module, "CaptureHiddenMode")

    @cached_property
    def runtime_context(self) -> ModuleType | None:
        return import_or_none(_SRT + "runtime_context")

    @cached_property
    def cp_utils(self) -> ModuleType | None:
        """CP-v2, where the pad of this release knows it."""
        if import_or_none(_SRT + "layers.cp.padding") is None:
            return None
        return import_or_none(_SRT + "layers.cp.utils")

    def spec_class(self, name: str) -> Any:
        """The class of a speculative input, by the name that was recorded; nothing else of SGLang
        can be named by a recording."""
        for module_name in ("speculative.eagle_info", "speculative.ngram_info"):
            module = import_or_none(_SRT + module_name)
            found = getattr(module, name, None)
            if isinstance(found, type) and "SpecInput" in {kind.__name__ for kind in found.mro()}:
                return found
        return None

    def table(self) -> dict[str, str | None]:
        """Every capability to what serves it; None where it is missing."""
        looks: dict[str, Callable[[], Any]] = {
            "pad": lambda: self.pad,
            "unpad": lambda: self.unpad,
            "spec scaling": lambda: self._scale_source(),
            "padding mode": lambda: self.padding_mode,
            "metadata padding": lambda: getattr(self.dsa_utils, self.pad_lengths),
            "DSA planning": lambda: self.dsa_class.init_forward_metadata,
            "logits": lambda: self.logits_class,
        }
        table: dict[str, str | None] = {}
        for name, look in looks.items():
            try:
                found = look()
            except (EnvironmentMissingError, ImportError):
                table[name] = None
                continue
            table[name] = found if isinstance(found, str) else found.__qualname__
        return table


_BLOCK_TEST = "batch.global_num_tokens is not None"


def _scale_by_method(method: Callable[..., Any]) -> Callable[[Any, Any, bool], str]:
    knows_draft = "is_draft_worker" in inspect.signature(method).parameters

    def scale(batch: Any, schedule: Any, is_draft_worker: bool) -> str:
        if knows_draft:
            batch.init_mlp_sync_metadata(schedule, "cpu", is_draft_worker=is_draft_worker)
        else:
            batch.init_mlp_sync_metadata(schedule, "cpu")
        return "init_mlp_sync_metadata"

    return scale


def _compile_block(
    node: ast.If, maker: Callable[..., Any], module: ModuleType
) -> Callable[[Any, Any, bool], str]:
    function = inspect.unwrap(getattr(maker, "__func__", maker))
    wrapper = ast.parse("def block(ret, batch, device): pass")
    definition = wrapper.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.body = [node]
    ast.increment_lineno(node, function.__code__.co_firstlineno - 1)
    ast.fix_missing_locations(wrapper)
    scope: dict[str, Any] = {}
    # SGLang's own source, in SGLang's own namespace; nothing of a recording is compiled.
    exec(compile(wrapper, function.__code__.co_filename, "exec"), module.__dict__, scope)
    block = scope["block"]

    def scale(batch: Any, schedule: Any, is_draft_worker: bool) -> str:
        block(batch, schedule, "cpu")
        return "init_new"

    return scale


def import_release() -> str:
    """Import the SGLang that is first on the path; returns what it calls itself."""
    name = "sglang.srt.model_executor.forward_batch_info"
    if import_or_none(name) is None:
        # Say what is missing as the import says it.
        importlib.import_module(name)
    import sglang

    return str(getattr(sglang, "__version__", "unknown"))
