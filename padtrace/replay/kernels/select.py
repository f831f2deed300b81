"""Which implementation answers for FlashMLA: ``--kernels auto|cuda|reference|off``."""

from __future__ import annotations

from typing import Literal

from padtrace.errors import EnvironmentMissingError, UsageError
from padtrace.replay.kernels.flash_mla_adapter import FlashMla
from padtrace.replay.kernels.generations import SGL_FLASH_MLA_1, Generation, for_sglang
from padtrace.replay.kernels.interface import Availability, FlashMlaKernel
from padtrace.replay.kernels.reference.gpu import DEFAULT_GPU, GpuModel
from padtrace.replay.kernels.reference.kernel import ReferenceKernel
from padtrace.replay.kernels.sgl_kernel_adapter import SglKernel

KernelKind = Literal["auto", "cuda", "reference", "off"]
KINDS: tuple[KernelKind, ...] = ("auto", "cuda", "reference", "off")


def generation_for(sglang_version: str | None) -> Generation:
    """The generation whose words a release's kernels use; the newest without a version."""
    return SGL_FLASH_MLA_1 if sglang_version is None else for_sglang(sglang_version)


def cuda_candidates(sglang_version: str | None = None) -> tuple[FlashMlaKernel, ...]:
    """The real kernels, the one that the release itself calls first."""
    sgl_kernel, legacy = SglKernel(), FlashMla(use_legacy=True)
    if generation_for(sglang_version) is SGL_FLASH_MLA_1:
        return legacy, sgl_kernel
    return sgl_kernel, legacy


def availability_table() -> dict[str, Availability]:
    """Every implementation with its availability, for ``padtrace doctor``."""
    every: tuple[FlashMlaKernel, ...] = (
        SglKernel(),
        FlashMla(use_legacy=True),
        FlashMla(use_legacy=False),
        ReferenceKernel(),
    )
    return {kernel.name: kernel.availability() for kernel in every}


def select(
    kind: str,
    *,
    sglang_version: str | None = None,
    gpu: GpuModel = DEFAULT_GPU,
) -> FlashMlaKernel | None:
    """The implementation to call.

    Args:
        kind: ``cuda`` a real kernel or an error; ``reference``; ``auto`` a real kernel where one
            is usable, else the reference; ``off`` None.
        sglang_version: decides which wheel comes first and the reference's wording.
        gpu: the card that the reference imitates.

    Raises:
        UsageError: an unknown kind.
        EnvironmentMissingError: ``cuda`` without a usable kernel; says why each is not.
    """
    if kind not in KINDS:
        raise UsageError(
            f"no kernels called {kind!r}",
            "--kernels takes one of: " + ", ".join(KINDS),
            "use --kernels auto",
        )
    if kind == "off":
        return None
    if kind != "reference":
        candidates = cuda_candidates(sglang_version)
        for kernel in candidates:
            if kernel.availability().usable:
                return kernel
        if kind == "cuda":
            reasons = "; ".join(f"{one.name}: {one.availability().reason}" for one in candidates)
            raise EnvironmentMissingError(
                "no FlashMLA kernel can be called here",
                reasons,
                "use --kernels reference, or run where CUDA and one of the wheels are",
            )
    return ReferenceKernel(gpu, generation_for(sglang_version))
