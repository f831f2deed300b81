"""What is hooked around the scene: nothing, hooks that do nothing, padtrace, SGLang's dumper.

All of them go onto the same functions in the same way: through SGLang's own hook registry, and onto
the kernels, which a server imports after its plugins have run, by padtrace's wrapping at import.
Each is installed once; arming one of them then only puts its functions into the classes, so that
rounds can alternate.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from padtrace.record import settings, start
from padtrace.record.install import wrap_attribute
from padtrace.record.state import State

_IMPORTED_LATE = "sgl_kernel."
Around = Callable[..., Any]


class Variants:
    """The functions that each variant puts at the hooked places."""

    def __init__(self, targets: Iterable[str]) -> None:
        """
        Args:
            targets: dotted names of the hooked functions.
        """
        self._places: dict[str, tuple[Any, str]] = {}
        for target in targets:
            owner, _, name = target.rpartition(".")
            self._places[target] = pkgutil.resolve_name(owner), name
        self._functions: dict[str, dict[str, Any]] = {"off": self._now()}

    def _now(self) -> dict[str, Any]:
        return {target: vars(owner)[name] for target, (owner, name) in self._places.items()}

    def install(self, variant: str, hooks: dict[str, Around]) -> None:
        """Have SGLang make the hooked functions, keep them, and put the plain ones back."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.reset()
        for target, hook in hooks.items():
            if target.startswith(_IMPORTED_LATE):
                wrap_attribute(*self._places[target], hook)
            else:
                HookRegistry.register(target, hook, HookType.AROUND)
        HookRegistry.apply_hooks()
        HookRegistry.reset()
        self._functions[variant] = self._now()
        self.arm("off")

    def arm(self, variant: str) -> None:
        for target, function in self._functions[variant].items():
            owner, name = self._places[target]
            setattr(owner, name, function)


class Recording:
    """padtrace's own hooks with a ring, started by the code that starts them in a server."""

    def __init__(self, folder: Path, ring_bytes: int) -> None:
        made: list[State] = []

        class Noted(State):
            def __init__(self, writer: Any) -> None:
                super().__init__(writer)
                made.append(self)

        os.environ[settings.FOLDER] = str(folder)
        os.environ[settings.RING] = f"{ring_bytes >> 20}M"
        os.environ[settings.RUN] = "bench"
        start.State = Noted  # type: ignore[misc]
        self.hooks = _caught(start.start)
        start.State = State  # type: ignore[misc]
        if not made or not self.hooks:
            raise SystemExit("padtrace did not start recording; its warnings are in the log")
        self.state = made[0]
        self.writer: Any = self.state.writer


def _caught(install: Callable[[], object]) -> dict[str, Around]:
    """What `install` registers with SGLang, without applying it."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.reset()
    install()
    hooks = {target: entries[0][1] for target, entries in HookRegistry._hooks.items()}
    HookRegistry.reset()
    return hooks


def empty_hooks(targets: Iterable[str]) -> dict[str, Around]:
    """A hook that calls the function and does nothing else."""

    def empty(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return dict.fromkeys(targets, empty)
