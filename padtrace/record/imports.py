"""Calls back when a module has been imported, before anybody can copy names out of it.

SGLang imports its model runner, attention backends and graph runners long after plugins are
loaded, and some kernels only at their first call. Importing them early to hook them would change
what the server does; so the hooks wait for the import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Ready = Callable[[str], None]


class ImportWatch(importlib.abc.MetaPathFinder):
    """A finder that finds nothing itself, but follows the import of the modules it waits for."""

    def __init__(self, ready: Ready) -> None:
        """
        Args:
            ready: called with the module's name once it is complete; what it raises is dropped.
        """
        self._ready = ready
        self._waiting: set[str] = set()

    def wait_for(self, module: str) -> None:
        """Call back when `module` has been imported; it must not be imported yet."""
        if not self._waiting and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._waiting.add(module)

    def stop(self) -> None:
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec the other finders give, its loader watched; None for all other modules."""
        if fullname not in self._waiting:
            return None
        self._waiting.discard(fullname)
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find and finder is not self else None
            if isinstance(spec, importlib.machinery.ModuleSpec):
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                del loader.exec_module
                self._ready(spec.name)
            except Exception:
                # The import itself went well; whoever waits for it reports its own failures.
                return

        try:
            loader.exec_module = exec_module
        except AttributeError:
            # A loader without room for an attribute: the module stays unwatched.
            return
