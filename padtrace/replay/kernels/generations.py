"""Which FlashMLA each SGLang release calls, and what differs between them.

Read from the releases' own metadata (``Requires-Dist``), their ``dsa_backend.py``, and the wheels'
Python files and message strings; the C++ is public in sgl-project/FlashMLA up to branch ``rebase``
(df022eb, 2026-05-21) only. Later wheels were read by their strings, so for them the *words* are
sure and the *order* of the checks is that of the last public source.

===========  ========================  ==============================================
SGLang       wheel                     where ``num_splits`` travels
===========  ========================  ==============================================
0.5.12       sglang-kernel 0.4.2.post2 tensor argument of ``sgl_kernel.flash_mla``
0.5.15       sglang-kernel 0.4.4       the same
0.5.16/.17   sglang-kernel 0.4.5       the same
0.5.18       sglang-kernel 0.4.6.post1 the same
0.5.20       sglang-kernel 0.4.7       the same
0.5.23       sgl-flash-mla 1.0.0       inside a ``FlashMLASchedMeta``; SGLang's wrapper
                                       ``kernels/ops/attention/flash_mla_interface.py``
                                       still takes the tensor and puts it there
===========  ========================  ==============================================

0.5.23 also pins sglang-kernel 0.4.10, whose own FlashMLA it no longer calls; of 0.4.8 and 0.4.9
nothing was read. sglang-kernel 0.4.2 knows only the call with tensors; from 0.4.4 on a call may
pass a ``FlashMLASchedMeta`` instead (DeepSeek-V4 does); DSA keeps the tensors in every release
above.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """One wording of the C++ checks.

    Attributes:
        key: stable identifier.
        wheels: the wheels that carry it, for reports.
        stable_abi: True where dtypes are spelled ``ScalarType::Int`` and a message begins with
            the C++ function, file and line (``STD_TORCH_CHECK``).
        names_formats: True where the KV format is a named thing (V32, V32_NO_ROPE, V4, V41).
        dense_head_v: the number that the dense call's head_size_v message names.
        wrapper_asserts_fp8: True where Python, not C++, refuses a sparse call without FP8.
    """

    key: str
    wheels: str
    stable_abi: bool
    names_formats: bool
    dense_head_v: int
    wrapper_asserts_fp8: bool = False


SGL_KERNEL_04_2 = Generation("sgl-kernel-0.4.2", "sglang-kernel 0.4.2 .. 0.4.4", False, False, 576)
SGL_KERNEL_04_5 = Generation("sgl-kernel-0.4.5", "sglang-kernel 0.4.5 .. 0.4.6", False, False, 512)
SGL_KERNEL_04_7 = Generation("sgl-kernel-0.4.7", "sglang-kernel 0.4.7 .. 0.4.9", False, True, 512)
SGL_KERNEL_04_10 = Generation("sgl-kernel-0.4.10", "sglang-kernel 0.4.10", False, True, 512, True)
SGL_FLASH_MLA_1 = Generation(
    "sgl-flash-mla-1", "sgl-flash-mla 1.0 (use_legacy)", True, True, 512, True
)

GENERATIONS = (
    SGL_KERNEL_04_2,
    SGL_KERNEL_04_5,
    SGL_KERNEL_04_7,
    SGL_KERNEL_04_10,
    SGL_FLASH_MLA_1,
)

_FIRST_RELEASE_OF = (
    ((0, 5, 21), SGL_FLASH_MLA_1),
    ((0, 5, 20), SGL_KERNEL_04_7),
    ((0, 5, 16), SGL_KERNEL_04_5),
)


def by_key(key: str) -> Generation:
    """The generation with this key; KeyError where there is none."""
    return {generation.key: generation for generation in GENERATIONS}[key]


def for_sglang(version: str) -> Generation:
    """The generation a release calls, by its version text.

    Only wording depends on this, so an unknown text gets the newest one. Releases between two
    listed ones were not read; they get the wording of the nearest older listed release, except
    that 0.5.21 and 0.5.22 get that of 0.5.23.
    """
    numbers: list[int] = []
    for piece in version.split(".")[:3]:
        digits = "".join(char for char in piece if char.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    if not numbers:
        return SGL_FLASH_MLA_1
    for first, generation in _FIRST_RELEASE_OF:
        if tuple(numbers) >= first:
            return generation
    return SGL_KERNEL_04_2
