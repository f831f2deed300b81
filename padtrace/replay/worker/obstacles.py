"""What stands between a CPU and an import of SGLang, and the answers; nothing of padding.

Everything here replaces a query of a device or an operator that only an accelerator has. The list
is the whole of it: torchvision's two operator schemas, `pin_memory`, the device that is shown
(`device`), the Triton interpreter, one kernel module of 0.5.15.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from padtrace.replay.devices import CPU
from padtrace.replay.worker import device as shown
from padtrace.replay.worker.standins import NotHeldError, sglang_line

_ENVIRONMENT = {
    # Triton kernels that plan metadata run interpreted.
    "TRITON_INTERPRET": "1",
    # The second version of the top-k plan is a JIT-compiled CUDA kernel.
    "SGLANG_OPT_USE_TOPK_V2": "0",
    # A replay decides from the host's integers; it must be the same beside a GPU.
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def prepare_environment(device: str = CPU, keep_gpu: bool = False) -> None:
    """Set the variables that count before torch is imported.

    Args:
        device: what SGLang is shown, see `worker.device`.

    Raises:
        UsageError: the device cannot be shown.
    """
    shown.prepare_environment(device)
    for name, value in _ENVIRONMENT.items():
        if not (keep_gpu and name == "CUDA_VISIBLE_DEVICES"):
            os.environ[name] = value
    # The plugins of this machine have no business in a replay.
    os.environ["SGLANG_PLUGINS"] = ""


def prepare_torch(device: str = CPU) -> None:
    """Make torch and torchvision importable for SGLang on a CPU, and show it the device."""
    import torch

    torch.set_num_threads(1)
    _declare_torchvision_operators(torch)
    torch.tensor = _without_pinning(torch.tensor)
    shown.show(torch, device)


def _declare_torchvision_operators(torch: Any) -> None:
    """With a CPU torch the compiled half of torchvision does not load; its Python half then
    misses two schemas."""
    if importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        try:
            library.define(schema)
        except RuntimeError:
            # The compiled half did load and has declared it.
            return
    _LIBRARIES.append(library)


# A library's declarations live as long as the object.
_LIBRARIES: list[Any] = []


def _without_pinning(original: Callable[..., Any]) -> Callable[..., Any]:
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        # Some of SGLang's code names the device whatever is shown; tensors stay on the CPU.
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    return tensor


class _OnlyOnGpu:
    """A name that a GPU module would have; calling it is a mistake of the replay."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotHeldError(
            f"SGLang calls {self._name}, which has no stand-in",
            f"it is called at {sglang_line()}",
            "report this line to padtrace's maintainers",
        )


# Kernels with a stand-in, by the hollow package that they are imported from.
KERNELS: dict[str, dict[str, Any]] = {}


def hollow_module(name: str) -> ModuleType:
    """Put a module in the place of one that only a GPU machine can import.

    Any name can be imported from it; nothing in it can be called.
    """
    module = ModuleType(name)

    def names(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _OnlyOnGpu(f"{name}.{attribute}")

    module.__getattr__ = names  # type: ignore[method-assign]
    module.__path__ = []
    for of_package, stand_ins in KERNELS.items():
        if of_package == name:
            vars(module).update(stand_ins)
    sys.modules[name] = module
    return module


# Kernel packages that a release imports and that only a GPU machine has.
_KERNEL_PACKAGES = frozenset(
    {"sgl_kernel", "flashinfer", "deep_gemm", "flash_attn", "flash_mla", "cutlass", "cuda"}
    | {"tilelang", "tvm_ffi", "quack", "deep_ep", "aiter", "cuda_tile"}
)
# Those that were missed, in order.
HOLLOW: list[str] = []


def import_or_none(name: str) -> ModuleType | None:
    """A module of this release, or None where the release has no such module.

    Kernel packages that it imports and that are not here become hollow.
    """
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name
            if missing is not None and (name == missing or name.startswith(missing + ".")):
                return None
            if missing is None or missing.split(".")[0] not in _KERNEL_PACKAGES:
                raise
            if missing in HOLLOW:
                raise
            HOLLOW.append(missing)
            hollow_module(missing)


# Kernel packages and modules that only a GPU machine can import, by what they need.
_GPU_MODULES = (
    ("cutlass", "sglang.jit_kernel.dsa.cutedsl_paged_mqa_logits"),
    ("flash_mla", "flash_mla"),
    ("flash_mla", "flash_mla.flash_mla_interface"),
)


def prepare_modules() -> None:
    """Stand in for kernel modules that the DSA backend imports and this machine cannot."""
    missing = {needed for needed, _ in _GPU_MODULES if importlib.util.find_spec(needed) is None}
    for needed, name in _GPU_MODULES:
        if needed in missing:
            hollow_module(name)
