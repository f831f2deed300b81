"""A real kernel against the reference, on fresh random inputs: the table of ``gpu_check.sh``.

``python -m padtrace.replay.kernels.compare`` prints it; tests/gpu asserts on the same rows. What is
compared: schedules integer for integer, outputs within bfloat16 tolerance, lse closely, refusals
word for word.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from padtrace.replay.kernels.error_text import own_words
from padtrace.replay.kernels.generations import (
    GENERATIONS,
    SGL_FLASH_MLA_1,
    SGL_KERNEL_04_2,
    SGL_KERNEL_04_5,
    SGL_KERNEL_04_7,
    SGL_KERNEL_04_10,
    Generation,
)
from padtrace.replay.kernels.interface import DecodeRequest, FlashMlaKernel, Plan, PlanRequest
from padtrace.replay.kernels.launch_shapes import LaunchShapes
from padtrace.replay.kernels.reference.gpu import GpuModel
from padtrace.replay.kernels.reference.kernel import ReferenceKernel
from padtrace.replay.kernels.refusals import REFUSALS
from padtrace.replay.kernels.select import cuda_candidates
from padtrace.replay.kernels.tensors import build_request

# FlashMLA's own tests allow these for bfloat16 outputs (tests/test_flash_mla_sparse_decoding.py).
OUT_ABSOLUTE = 1e-3
OUT_RELATIVE = 2.01 / 128
# The kernel dequantises, multiplies and sums in bfloat16 and float32; the reference in float64.
LSE_TOLERANCE = 1e-4

HEADS = (64, 128)
BATCHES = (1, 2, 3, 7, 16, 33, 64, 128, 200, 256, 512)
TOPKS = (64, 128, 576, 2048)
DECODE_BATCHES = (1, 5, 64, 512)


@dataclass(frozen=True)
class Comparison:
    """One line of the table.

    Attributes:
        check: what was compared.
        case: on which input.
        agrees: whether kernel and reference agree.
        detail: the largest difference, or both sides where they disagree.
    """

    check: str
    case: str
    agrees: bool
    detail: str


def reference_like(kernel: FlashMlaKernel) -> ReferenceKernel:
    """A reference for this card and this kernel's wording, computing on the same device."""
    if kernel.device.type != "cuda":
        return ReferenceKernel(device=kernel.device)
    seen = torch.cuda.get_device_properties(kernel.device)
    gpu = GpuModel(seen.name, seen.major, seen.minor, seen.multi_processor_count)
    return ReferenceKernel(gpu, generation_of(kernel), device=kernel.device)


def generation_of(kernel: FlashMlaKernel) -> Generation:
    """The wording of a kernel, from its name and version."""
    if isinstance(kernel, ReferenceKernel):
        return kernel.generation
    if not kernel.name.startswith("sgl_kernel"):
        return SGL_FLASH_MLA_1
    version = kernel.name.rsplit(" ", 1)[-1].rstrip(")")
    pieces = [int(piece) for piece in version.split(".")[:3] if piece.isdigit()]
    if pieces >= [0, 4, 10] or len(pieces) < 3:
        return SGL_KERNEL_04_10
    if pieces >= [0, 4, 7]:
        return SGL_KERNEL_04_7
    return SGL_KERNEL_04_5 if pieces >= [0, 4, 5] else SGL_KERNEL_04_2


def compare_schedules(kernel: FlashMlaKernel, reference: ReferenceKernel) -> Iterator[Comparison]:
    """Sparse and dense plans. Rows of parts without work are compared by their first entry only:
    the kernel fills the rest from memory it does not own."""
    generator = torch.Generator().manual_seed(5)
    for batch in BATCHES:
        lengths = torch.randint(0, 5000, (batch,), generator=generator, dtype=torch.int32)
        lengths[:: max(batch // 3, 2)] = 0
        lengths = lengths.to(kernel.device)
        for heads in HEADS:
            requests = [
                PlanRequest(lengths, heads, 1, heads, True, topk)
                for topk in (TOPKS if batch in (1, 64, 512) else TOPKS[-1:])
            ]
            requests.append(PlanRequest(lengths, heads, 1))
            for request in requests:
                case = f"b {batch}, {heads} heads, " + (
                    f"topk {request.topk}" if request.topk else "dense"
                )
                yield _compare_plans(case, kernel, reference, request)


def _compare_plans(
    case: str, kernel: FlashMlaKernel, reference: ReferenceKernel, request: PlanRequest
) -> Comparison:
    real, ours = kernel.get_mla_metadata(request), reference.get_mla_metadata(request)
    batch = request.cache_seqlens.shape[0]
    same_splits = real.num_splits.tolist() == ours.num_splits.tolist()
    left, right = _working(real, batch), _working(ours, batch)
    fine = same_splits and left == right
    detail = f"{len(left)} parts, {int(ours.num_splits[-1])} splits"
    if not fine:
        detail = f"kernel {real.num_splits.tolist()[:8]} {left[:2]}, reference "
        detail += f"{ours.num_splits.tolist()[:8]} {right[:2]}"
    return Comparison("schedule", case, fine, detail)


def _working(plan: Plan, batch: int) -> list[list[int]]:
    rows: list[list[int]] = plan.tile_scheduler_metadata.tolist()
    return [row[:7] if row[0] < batch else row[:1] for row in rows]


def compare_outputs(kernel: FlashMlaKernel, reference: ReferenceKernel) -> Iterator[Comparison]:
    """Sparse FP8 decodes with -1 among the indices and some rows with nothing to attend to."""
    for batch in DECODE_BATCHES:
        for heads in HEADS:
            for topk in TOPKS:
                launch = LaunchShapes((batch, 1, heads, 576), indices_shape=(batch, 1, topk))
                request = build_request(launch, None, kernel.device, batch + topk, values=True)
                assert request.indices is not None
                request.indices[batch // 2] = -1
                case = f"b {batch}, {heads} heads, topk {topk}"
                yield _compare_decode(case, kernel, reference, request, (heads, topk))


def _compare_decode(
    case: str,
    kernel: FlashMlaKernel,
    reference: ReferenceKernel,
    request: DecodeRequest,
    sizes: tuple[int, int],
) -> Comparison:
    assert request.cache_seqlens is not None
    plan_request = PlanRequest(request.cache_seqlens, sizes[0], 1, sizes[0], True, sizes[1])
    plan = kernel.get_mla_metadata(plan_request)
    request = replace(
        request,
        tile_scheduler_metadata=plan.tile_scheduler_metadata,
        num_splits=plan.num_splits,
    )
    real, ours = kernel.flash_mla_with_kvcache(request), reference.flash_mla_with_kvcache(request)
    assert real.out is not None
    assert real.lse is not None
    assert ours.out is not None
    assert ours.lse is not None
    out, wanted = real.out.double(), ours.out.double()
    difference = (out - wanted).abs()
    out_fine = bool((difference <= OUT_ABSOLUTE + OUT_RELATIVE * wanted.abs()).all())
    same_infinite = torch.equal(real.lse.isinf(), ours.lse.isinf())
    lse = (real.lse.double() - ours.lse.double()).abs()
    largest_lse = float(lse[~ours.lse.isinf()].nan_to_num(torch.inf).max())
    fine = out_fine and same_infinite and largest_lse <= LSE_TOLERANCE
    detail = f"out {float(difference.nan_to_num(torch.inf).max()):.1e}, lse {largest_lse:.1e}"
    return Comparison("output", case, fine, detail)


def compare_refusals(kernel: FlashMlaKernel, reference: ReferenceKernel) -> Iterator[Comparison]:
    """Wrong arguments: the words of both, or that both take the call."""
    for case in REFUSALS:
        request = case.build(kernel, reference)
        said = [_words_of(one, request) for one in (kernel, reference)]
        detail = said[1] if said[0] == said[1] else f"kernel: {said[0]!r}, reference: {said[1]!r}"
        yield Comparison("refusal", case.name, said[0] == said[1], detail)


def _words_of(kernel: FlashMlaKernel, request: DecodeRequest) -> str:
    try:
        kernel.flash_mla_with_kvcache(request)
    except Exception as error:
        return own_words(error)
    return "taken"


def compare_all(
    kernel: FlashMlaKernel, reference: ReferenceKernel | None = None
) -> Iterator[Comparison]:
    """Every comparison, cheapest first."""
    reference = reference or reference_like(kernel)
    every: tuple[Callable[[FlashMlaKernel, ReferenceKernel], Iterator[Comparison]], ...] = (
        compare_schedules,
        compare_refusals,
        compare_outputs,
    )
    for one in every:
        yield from one(kernel, reference)


def _print_table(kernel: FlashMlaKernel) -> bool:
    started = time.monotonic()
    rows = list(compare_all(kernel))
    print(f"\n{kernel.name}, wording {generation_of(kernel).key}")
    for check in dict.fromkeys(row.check for row in rows):
        of_check = [row for row in rows if row.check == check]
        wrong = [row for row in of_check if not row.agrees]
        print(f"  {check:10} {len(of_check) - len(wrong):4} of {len(of_check):4} agree")
        for row in wrong[:10]:
            print(f"    DIFFERS  {row.case}: {row.detail}")
    print(f"  {time.monotonic() - started:.1f} s")
    return all(row.agrees for row in rows)


def main() -> int:
    """Compare every usable real kernel; 0 all agree, 1 some differ, 4 none usable."""
    print(f"torch {torch.__version__}, wordings known: {len(GENERATIONS)}")
    if torch.cuda.is_available():
        seen = torch.cuda.get_device_properties(0)
        count = seen.multi_processor_count
        print(f"card {seen.name}, SM {seen.major}.{seen.minor}, {count} SMs")
    verdicts = []
    for kernel in cuda_candidates():
        found = kernel.availability()
        if found.usable:
            verdicts.append(_print_table(kernel))
        else:
            print(f"not run: {kernel.name}: {found.reason}")
    if not verdicts:
        return 4
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
