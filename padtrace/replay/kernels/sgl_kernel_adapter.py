"""The real kernels of the sglang-kernel / sgl-kernel wheel, through ``sgl_kernel.flash_mla``.

Where that package does not import (it loads more than a gigabyte of other kernels and needs their
libraries), the one extension file it holds for FlashMLA is loaded alone: ``flashmla_ops.abi3.so``
registers ``torch.ops.sgl_kernel.*`` by itself, and the wheel's own ``flash_mla.py`` is then run
over it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from padtrace.replay.kernels.cuda_state import cuda_reason
from padtrace.replay.kernels.interface import (
    Availability,
    DecodeRequest,
    DecodeResult,
    Plan,
    PlanRequest,
)

_DISTRIBUTIONS = ("sglang-kernel", "sgl-kernel")


def _distribution() -> tuple[str, str] | None:
    for name in _DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _import_whole() -> types.ModuleType:
    module = importlib.import_module("sgl_kernel.flash_mla")
    failed = getattr(module, "_flashmla_import_error", None)
    if failed is not None:
        raise ImportError(f"sgl_kernel.flashmla_ops: {failed}")
    return module


def _import_alone(root: Path) -> types.ModuleType:
    """Load ``flash_mla.py`` and ``flashmla_ops*.so`` of an unpacked wheel, and nothing else."""
    library = next(iter(sorted(root.glob("flashmla_ops*.so"))), None)
    source = root / "flash_mla.py"
    if library is None or not source.is_file():
        raise ImportError(f"{root.name} holds no flash_mla.py with flashmla_ops")
    load_library: Callable[[str], None] = torch.ops.load_library
    load_library(str(library))
    # The wheel's file asks for the extension by name only to have it registered.
    package = types.ModuleType("sgl_kernel")
    package.__path__ = [str(root)]
    stand_in = types.ModuleType("sgl_kernel.flashmla_ops")
    package.flashmla_ops = stand_in  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("sgl_kernel.flash_mla", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    added = {"sgl_kernel": package, "sgl_kernel.flashmla_ops": stand_in}
    before = {name: sys.modules.get(name) for name in added}
    sys.modules.update(added)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, old in before.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
    return module


class SglKernel:
    """``sgl_kernel.flash_mla`` of the installed wheel."""

    def __init__(self) -> None:
        self._module: types.ModuleType | None = None
        self._failure = ""

    @property
    def name(self) -> str:
        """Distribution and version, as far as they are known."""
        found = _distribution()
        return "sgl_kernel.flash_mla" + (f" ({found[0]} {found[1]})" if found else "")

    @property
    def device(self) -> torch.device:
        """The current CUDA device."""
        return torch.device("cuda")

    def availability(self) -> Availability:
        """Usable where CUDA works, the wheel is there and its library loads."""
        reason = cuda_reason()
        if reason:
            return Availability(False, reason)
        if self._load() is None:
            return Availability(False, self._failure)
        return Availability(True, f"{self.name} on {torch.cuda.get_device_name()}")

    def get_mla_metadata(self, request: PlanRequest) -> Plan:
        """``sgl_kernel.flash_mla.get_mla_metadata``."""
        metadata, num_splits = self._required().get_mla_metadata(
            request.cache_seqlens,
            request.num_q_tokens_per_head_k,
            request.num_heads_k,
            num_heads_q=request.num_heads_q,
            is_fp8_kvcache=request.is_fp8_kvcache,
            topk=request.topk,
        )
        return Plan(metadata, num_splits)

    def flash_mla_with_kvcache(self, request: DecodeRequest) -> DecodeResult:
        """``sgl_kernel.flash_mla.flash_mla_with_kvcache``."""
        function = self._required().flash_mla_with_kvcache
        out, lse = function(**wanted_arguments(request, function))
        return DecodeResult(out, lse, None)

    def _load(self) -> types.ModuleType | None:
        if self._module is not None or self._failure:
            return self._module
        try:
            self._module = _import_whole()
        except Exception as whole:
            self._module = self._load_alone(whole)
        return self._module

    def _load_alone(self, whole: Exception) -> types.ModuleType | None:
        spec = importlib.machinery.PathFinder.find_spec("sgl_kernel")
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            self._failure = "neither sglang-kernel nor sgl-kernel is installed"
            return None
        try:
            return _import_alone(Path(places[0]))
        except Exception as alone:
            self._failure = f"sgl_kernel does not load: {first_line(whole)}; {first_line(alone)}"
            return None

    def _required(self) -> Any:
        module = self._load()
        if module is None:
            raise RuntimeError(self._failure)
        return module


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def wanted_arguments(request: DecodeRequest, function: Any) -> dict[str, Any]:
    """The request as keyword arguments that this release's function has.

    An argument that the function lacks is left out only while it holds its default; otherwise it
    stays in, so that the call fails with Python's own words instead of computing something else.
    """
    has = set(inspect.signature(function).parameters)
    arguments = {}
    for field in fields(request):
        value = getattr(request, field.name)
        if field.name in has or value is not field.default:
            arguments[field.name] = value
    return arguments
