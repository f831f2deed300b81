"""What a refusal of the C++ interface says, and the checks that many arguments share.

Source: ``csrc/kerutils/include/kerutils/supplemental/torch_tensors.h`` (the ``KU_CHECK_*``
macros), ``csrc/kerutils/include/kerutils/host/host.h`` (``KU_ASSERT``) and torch's own text for a
check without words. A tensor's device is not checked: here CPU tensors stand for CUDA ones.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from padtrace.replay.kernels.generations import Generation

_TORCH_K = {torch.bfloat16: "kBFloat16", torch.int32: "kInt32", torch.float32: "kFloat32"}
_SCALAR_TYPE = {torch.bfloat16: "BFloat16", torch.int32: "Int", torch.float32: "Float"}


class KernelRefusedError(RuntimeError):
    """The reference refuses a call in the kernel's words, as torch raises them (RuntimeError)."""


class KernelExitsError(RuntimeError):
    """The real library ends the process here (``FLASH_ASSERT``), so the call must not be made."""


class NotCoveredError(RuntimeError):
    """The reference does not know this case, so nothing is said about it."""


def refuse(text: str) -> NoReturn:
    """Refuse with this text."""
    raise KernelRefusedError(text)


def require(condition: bool, text: str) -> None:
    """``TORCH_CHECK(condition, text)``."""
    if not condition:
        refuse(text)


class Checks:
    """The shared checks in the words of one generation."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def wordless(self, condition: bool, source: str) -> None:
        """``TORCH_CHECK(condition)``; the stable ABI leaves only the place, so no words."""
        if not condition:
            refuse(
                ""
                if self.generation.stable_abi
                else f"Expected {source} to be true, but got false.  (Could this error message be "
                "improved?  If so, please report an enhancement request to PyTorch.)"
            )

    def ndim(self, name: str, tensor: torch.Tensor, ndim: int) -> None:
        """``KU_CHECK_NDIM``."""
        require(tensor.dim() == ndim, f"{name} must have {ndim} dimensions")

    def dtype(self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> None:
        """``KU_CHECK_DTYPE``."""
        spelled = (
            f"ScalarType::{_SCALAR_TYPE[dtype]}"
            if self.generation.stable_abi
            else f"torch::{_TORCH_K[dtype]}"
        )
        require(tensor is None or tensor.dtype == dtype, f"{name} must have dtype {spelled}")

    def contiguous(self, name: str, tensor: torch.Tensor | None) -> None:
        """``KU_CHECK_CONTIGUOUS``."""
        require(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")

    def last_dim(self, name: str, tensor: torch.Tensor | None) -> None:
        """``KU_CHECK_LAST_DIM_CONTIGUOUS``."""
        fine = tensor is None or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
        require(fine, f"{name} must have contiguous last dimension")

    def shape(
        self, name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], spelled: str
    ) -> None:
        """``KU_CHECK_SHAPE``; ``spelled`` is the C++ expression of the shape."""
        fine = tensor is None or tuple(tensor.shape) == shape
        require(fine, f"{name} must have shape ({spelled})")


def launcher_assert(condition: bool, source: str) -> None:
    """``KU_ASSERT`` of a kernel launcher."""
    require(condition, f"Assertion `{source}` failed.")
