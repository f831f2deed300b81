"""Puts the probes into SGLang: by its own hook registry, or at import where that comes later.

Every target of the table is looked for first; one that is not there is an entry of the coverage.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from padtrace.record.alarm import Alarm
from padtrace.record.facts_collector import fingerprint, runner_facts
from padtrace.record.hooks import Around, Hook, around, bound, watching
from padtrace.record.imports import ImportWatch
from padtrace.record.probes.batch import InitNewProbe, SyncProbe
from padtrace.record.probes.context import Context
from padtrace.record.probes.forward import ForwardProbe
from padtrace.record.probes.graph import BucketWatch, GraphProbe
from padtrace.record.probes.launch import LaunchProbe
from padtrace.record.probes.pad import PadInputsProbe, PadProbe, UnpadProbe
from padtrace.record.probes.plan import FlashMLAMetadataWatch, PlanProbe, SliceWatch
from padtrace.record.probes.ready import ReadyProbe
from padtrace.record.probes.steps import StepCounter
from padtrace.record.state import State
from padtrace.record.targets import CALCULATORS, TARGETS, Look, Target, choose, resolve

logger = logging.getLogger("padtrace")

# What an attention backend may plan with; which of them it has is looked up once it is built.
PLAN_METHODS = (
    "init_forward_metadata",
    "init_forward_metadata_out_graph",
    "init_forward_metadata_capture_cuda_graph",
    "init_forward_metadata_replay_cuda_graph",
)
# Where a backend keeps the backends it wraps.
_INNER = (
    "primary", "children", "prefill_backend", "decode_backend", "attn_backends",
    "attn_backend_list", "full_attn_backend", "linear_attn_backend",
)  # fmt: skip
_BASE_BACKEND = "AttentionBackend"

Register = Callable[[str, Around], None]


class Installer:
    """Installs the hooks of one process."""

    def __init__(
        self,
        context: Context,
        alarm: Alarm | None,
        look: Look,
        register: Register,
        is_compiling: Callable[[], bool],
    ) -> None:
        """
        Args:
            look: whether a function is there, see `targets`.
            register: gives a dotted target and its AROUND hook to SGLang's registry.
            is_compiling: torch.compiler.is_dynamo_compiling, or is_compiling.
        """
        self._context = context
        self._state: State = context.state
        self._alarm = alarm
        self._look = look
        self._register = register
        self._is_compiling = is_compiling
        self._pending: dict[str, list[Callable[[], None]]] = {}
        self._watch = ImportWatch(self._imported)
        self._launches: list[LaunchProbe] = []
        self._classes: set[tuple[type, str]] = set()
        self._steps = StepCounter(context)
        self._buckets = BucketWatch(context)
        self._has = {target.hook: choose(target, look)[1] != "" for target in TARGETS}

    def install(self) -> None:
        """Hook every target that is there, now or when its module has been imported."""
        for target in TARGETS:
            status, candidate = choose(target, self._look)
            dotted = candidate.replace(":", ".")
            number = self._state.writer.hook(target.hook, status, dotted, target.cost)
            if status == "absent":
                continue
            hook = Hook(self._state, target.hook, number)
            module, _, attribute = candidate.partition(":")
            wrapper = self._wrapper(target, attribute.rpartition(".")[2], hook)
            self._when_imported(module, attribute, wrapper, hook)
        for candidate in CALCULATORS:
            module, _, attribute = candidate.partition(":")
            if self._look(module, attribute):
                self._fingerprint_when_imported(module, attribute)

    def finish_launches(self) -> None:
        """Write how often each launch of the forward that ends happened."""
        for launch in self._launches:
            launch.finish()

    def _finisher(self) -> Callable[[], None]:
        shared = self._context.shared
        finish: Callable[[], None] = shared.finish_launches if shared else self.finish_launches
        return finish

    def hook_backend(self, backend: Any) -> None:
        """Hook the planning methods of a backend's class, and of the backends inside it."""
        if backend is None or isinstance(backend, (int, str)):
            return
        for cls in type(backend).__mro__:
            if cls.__name__ == _BASE_BACKEND or not cls.__module__.startswith("sglang"):
                continue
            for method in PLAN_METHODS:
                if method in vars(cls) and (cls, method) not in self._classes:
                    self._hook_class(cls, method)
        for name in _INNER:
            inner = vars(backend).get(name) if hasattr(backend, "__dict__") else None
            for one in inner if isinstance(inner, (list, tuple)) else (inner,):
                self.hook_backend(one)

    def _hook_class(self, cls: type, method: str) -> None:
        self._classes.add((cls, method))
        function = vars(cls)[method]
        if not callable(function):
            return
        name = f"{cls.__name__}.{method}"
        number = self._state.writer.hook(name, "found", f"{cls.__module__}.{cls.__qualname__}")
        hook = Hook(self._state, name, number)
        probe = self._probe("plan", method)
        wrap_attribute(cls, method, around(hook, probe, self._state, self._is_compiling))
        self._fingerprint(f"{cls.__module__}.{cls.__qualname__}.{method}", function)

    def _wrapper(self, target: Target, function: str, hook: Hook) -> Around:
        """The AROUND hook of one row of the table."""
        context, state, compiling = self._context, self._state, self._is_compiling
        probe = self._probe(target.probe, function)
        if isinstance(probe, LaunchProbe):
            self._launches.append(probe)
            return probe.around(hook, compiling)
        if probe is not None:
            return around(hook, probe, state, compiling)
        before: Any = {"step": self._steps.sync, "round": self._steps.round}.get(target.probe)
        after: Any = {
            "backends": self._backends_built,
            "draft_backend": self._draft_backend_built,
            "flashmla_metadata": FlashMLAMetadataWatch(context).after,
            "slice": SliceWatch(context).after,
            "bucket": self._buckets.padded,
            "largest": self._buckets.largest,
        }.get(target.probe)
        return watching(hook, state, compiling, before=before, after=after)

    def _probe(self, kind: str, function: str) -> Any:
        context = self._context
        if kind == "forward":
            skip = None if self._has["mark_forward_metadata_ready"] else ReadyProbe(context)
            return ForwardProbe(context, self._finisher(), self.tell_runner, skip)
        if kind == "init_new":
            sync = None if self._has["init_mlp_sync_metadata"] else SyncProbe(context)
            return InitNewProbe(context, sync)
        if kind == "plan":
            return PlanProbe(context, function, self._finisher())
        if kind in ("judge", "load"):
            return GraphProbe(context, function, chooses=kind == "load")
        if kind == "launch":
            return LaunchProbe(context, function, self._alarm)
        if kind == "pad":
            blind = not self._has["flash_mla_with_kvcache"]
            return PadProbe(context, self._alarm.padded if self._alarm and blind else None)
        simple = {
            "sync": SyncProbe,
            "ready": ReadyProbe,
            "pad_inputs": PadInputsProbe,
            "unpad": UnpadProbe,
        }.get(kind)
        return simple(context) if simple is not None else None

    def tell_runner(self, model_runner: Any) -> None:
        """Write the facts of a model runner into the ring."""
        self._state.writer.facts(runner_facts(model_runner))

    def _backends_built(self, result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        self.hook_backend(getattr(model_runner, "attn_backend", None))
        self.tell_runner(model_runner)

    def _draft_backend_built(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self.hook_backend(result)

    def _when_imported(self, module: str, attribute: str, wrapper: Around, hook: Hook) -> None:
        loaded = sys.modules.get(module)
        if loaded is not None:
            self._fingerprint(f"{module}.{attribute}", resolve(loaded, attribute))
            self._register(f"{module}.{attribute}", wrapper)
            self._note_class(loaded, attribute)
            return

        def hook_it() -> None:
            complete = sys.modules[module]
            owner, _, name = attribute.rpartition(".")
            holder = resolve(complete, owner) if owner else complete
            if holder is None or getattr(holder, name, None) is None:
                self._state.writer.lost(hook.number, self._state.string("not there once imported"))
                return
            self._fingerprint(f"{module}.{attribute}", getattr(holder, name))
            wrap_attribute(holder, name, wrapper)
            self._note_class(complete, attribute)

        self._later(module, hook_it)

    def _note_class(self, module: Any, attribute: str) -> None:
        owner, _, name = attribute.rpartition(".")
        cls = resolve(module, owner) if owner else None
        if isinstance(cls, type) and name in PLAN_METHODS:
            self._classes.add((cls, name))

    def _fingerprint_when_imported(self, module: str, attribute: str) -> None:
        def take() -> None:
            self._fingerprint(f"{module}.{attribute}", resolve(sys.modules[module], attribute))

        if module in sys.modules:
            take()
        else:
            self._later(module, take)

    def _later(self, module: str, action: Callable[[], None]) -> None:
        if module not in self._pending:
            self._pending[module] = []
            self._watch.wait_for(module)
        self._pending[module].append(action)

    def _imported(self, module: str) -> None:
        for action in self._pending.pop(module, ()):
            try:
                action()
            except Exception as error:
                logger.warning("padtrace: could not hook into %s: %s", module, error)

    def _fingerprint(self, dotted: str, function: Any) -> None:
        found = fingerprint(function)
        if found is not None:
            self._state.writer.facts({"fingerprints": {dotted: found}})


def wrap_attribute(holder: Any, name: str, hooked: Around) -> None:
    """Replace a function of a module or class by one that goes through an AROUND hook.

    Like SGLang's registry does it; class and static methods stay what they are.
    """
    raw: Any = vars(holder).get(name, _MISSING) if isinstance(holder, type) else _MISSING
    kind = type(raw) if isinstance(raw, (classmethod, staticmethod)) else None
    original = raw.__func__ if kind is not None else getattr(holder, name)
    function = bound(hooked, original)
    setattr(holder, name, kind(function) if kind is not None else function)


_MISSING = object()
