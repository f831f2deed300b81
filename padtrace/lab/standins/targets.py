"""Finding and replacing a target in SGLang, without guessing from version numbers."""

import importlib
from types import ModuleType
from typing import Any


def module_if_present(name: str) -> ModuleType | None:
    """The module, or None when this release does not have it.

    A module that is there but fails to import raises: that is no missing target.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            return None
        raise


def first_present(*names: str) -> ModuleType:
    """The first of these modules that this release has; LookupError if it has none."""
    for name in names:
        module = module_if_present(name)
        if module is not None:
            return module
    raise LookupError(f"this SGLang has none of {', '.join(names)}")


def first_with(name: str, *modules: str) -> ModuleType:
    """The first of these modules that this release has and that holds `name`."""
    for module in map(module_if_present, modules):
        if module is not None and hasattr(module, name):
            return module
    raise LookupError(f"this SGLang has {name} in none of {', '.join(modules)}")


def replace(owner: Any, name: str, stand_in: Any) -> None:
    """Set `owner.name` to the stand-in; LookupError if there is nothing by that name to replace."""
    if not hasattr(owner, name):
        raise LookupError(f"{getattr(owner, '__name__', owner)!s} has no {name} to stand in for")
    setattr(owner, name, stand_in)
