"""The comparison that runs on a GPU, tried on kernels that are known to be right or wrong."""

# ruff: noqa: E402 - the skip comes before the imports that need torch

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the kernel reference needs torch")

from padtrace.replay.kernels import compare
from padtrace.replay.kernels.generations import SGL_KERNEL_04_5
from padtrace.replay.kernels.interface import DecodeRequest, DecodeResult, Plan, PlanRequest
from padtrace.replay.kernels.reference.kernel import ReferenceKernel
from padtrace.replay.kernels.reference.words import KernelRefusedError


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compare, "BATCHES", (1, 7))
    monkeypatch.setattr(compare, "DECODE_BATCHES", (2,))
    monkeypatch.setattr(compare, "TOPKS", (64,))
    monkeypatch.setattr(compare, "HEADS", (64,))
    return


class Wrong(ReferenceKernel):
    """The reference with one thing wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def get_mla_metadata(self, request: PlanRequest) -> Plan:
        plan = super().get_mla_metadata(request)
        if self.fault == "schedule":
            plan.tile_scheduler_metadata[0, 3] += 1
        return plan

    def flash_mla_with_kvcache(self, request: DecodeRequest) -> DecodeResult:
        if self.fault == "words" and request.q.dtype == torch.float32:
            raise KernelRefusedError("q must be bfloat16")
        answer = super().flash_mla_with_kvcache(request)
        assert answer.out is not None
        assert answer.lse is not None
        if self.fault == "output":
            return replace(answer, out=answer.out * 1.05)
        if self.fault == "nan":
            return replace(answer, out=torch.full_like(answer.out, torch.nan))
        if self.fault == "lse":
            return replace(answer, lse=answer.lse + 0.01)
        return answer


def failing(kernel: ReferenceKernel) -> set[str]:
    rows = list(compare.compare_all(kernel, ReferenceKernel()))
    assert {row.check for row in rows} == {"schedule", "refusal", "output"}
    return {row.check for row in rows if not row.agrees}


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("", set()),
        ("output", {"output"}),
        ("nan", {"output"}),
        ("lse", {"output"}),
        ("words", {"refusal"}),
    ],
)
def test_a_fault_is_seen_where_it_is(fault: str, checks: set[str]) -> None:
    assert failing(Wrong(fault)) == checks


def test_a_wrong_schedule_is_seen() -> None:
    assert "schedule" in failing(Wrong("schedule"))


def test_a_wording_of_another_generation_is_seen() -> None:
    rows = compare.compare_refusals(ReferenceKernel(generation=SGL_KERNEL_04_5), ReferenceKernel())
    assert "one SM part too few" in {row.case for row in rows if not row.agrees}


def test_wording_by_version() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    def key(version: str) -> str:
        kernel = Named(f"sgl_kernel.flash_mla (sglang-kernel {version})")
        return compare.generation_of(kernel).key  # type: ignore[arg-type]

    assert key("0.4.2.post2") == key("0.4.4") == "sgl-kernel-0.4.2"
    assert key("0.4.5") == key("0.4.6.post1") == "sgl-kernel-0.4.5"
    assert key("0.4.7") == "sgl-kernel-0.4.7"
    assert key("0.4.10") == "sgl-kernel-0.4.10"
    named = Named("flash_mla (sgl-flash-mla 1.0.0, legacy)")
    assert compare.generation_of(named).key == "sgl-flash-mla-1"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernels", "code", "told"),
    [
        ((Wrong(""),), 0, "output        1 of    1 agree"),
        ((Wrong("output"),), 1, "DIFFERS  b 2, 64 heads, topk 64"),
        ((), 4, "wordings known"),
    ],
)
def test_the_table(
    kernels: tuple[ReferenceKernel, ...],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compare, "cuda_candidates", lambda: kernels)
    assert compare.main() == code
    assert told in capsys.readouterr().out
