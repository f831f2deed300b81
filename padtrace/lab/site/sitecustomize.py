"""Runs at the start of every Python process of a lab server, before SGLang imports anything.

With a CPU torch the compiled half of torchvision usually does not load, and its Python half then
fails on two operators it expects to exist. This installs a finder that, at the first import of
torchvision and not earlier, defines their schemas if the compiled half is really out of reach.
Python runs only the first `sitecustomize` on the path, so the one we stand before is run as well.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; prepares torch when somebody looks for torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if _compiled_half_loads():
            return
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", _NMS_SCHEMA)


def _compiled_half_loads() -> bool:
    """Whether torchvision's own library loads; torchvision loading it again is harmless."""
    import torch

    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    for library in Path(spec.origin).parent.glob("_C.*"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
        return True
    return False


def _run_shadowed() -> None:
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("PADTRACE_LAB") == "1":
    sys.meta_path.insert(0, TorchvisionFinder())
    # Importing SGLang makes half a million objects that all stay; looking through them again and
    # again for garbage is a fifth of its import time.
    gc.set_threshold(100_000, 50, 50)
_run_shadowed()
