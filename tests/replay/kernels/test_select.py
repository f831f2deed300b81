"""Which implementation answers, and how a missing one is told."""

# ruff: noqa: E402 - the skip comes before the imports that need torch

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the kernel reference needs torch")

from padtrace.errors import EnvironmentMissingError, UsageError
from padtrace.replay.kernels.cuda_state import cuda_reason
from padtrace.replay.kernels.flash_mla_adapter import FlashMla
from padtrace.replay.kernels.interface import DecodeRequest, FlashMlaKernel
from padtrace.replay.kernels.reference.gpu import B200
from padtrace.replay.kernels.reference.kernel import ReferenceKernel
from padtrace.replay.kernels.select import availability_table, cuda_candidates, select
from padtrace.replay.kernels.sgl_kernel_adapter import SglKernel, wanted_arguments

without_cuda = pytest.mark.skipif(not cuda_reason(), reason="CUDA works here")


def test_off_and_reference() -> None:
    assert select("off") is None
    kernel = select("reference", sglang_version="0.5.17", gpu=B200)
    assert isinstance(kernel, ReferenceKernel)
    assert kernel.name == "reference (B200, sgl-kernel-0.4.5)"
    assert kernel.availability().usable


def test_an_unknown_kind_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as refused:
        select("gpu")
    assert refused.value.exit_code == 2
    assert "auto, cuda, reference, off" in str(refused.value)


@without_cuda
def test_auto_falls_back_and_cuda_says_why_not() -> None:
    assert isinstance(select("auto"), ReferenceKernel)
    with pytest.raises(EnvironmentMissingError) as refused:
        select("cuda")
    assert refused.value.exit_code == 4
    assert cuda_reason() in refused.value.why
    assert "--kernels reference" in refused.value.hint


def test_the_release_decides_which_wheel_comes_first() -> None:
    assert isinstance(cuda_candidates("0.5.17")[0], SglKernel)
    assert isinstance(cuda_candidates("0.5.23")[0], FlashMla)
    assert isinstance(cuda_candidates()[0], FlashMla)


def test_every_implementation_is_listed_with_a_reason() -> None:
    table = availability_table()
    assert len(table) == 4
    assert all(found.reason for found in table.values())


def test_every_implementation_has_the_interface() -> None:
    for kernel in (ReferenceKernel(), SglKernel(), FlashMla(), FlashMla(use_legacy=False)):
        assert isinstance(kernel, FlashMlaKernel)


def test_wheels_without_their_library_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sgl_kernel", "flash_mla"):
        if any(module == name or module.startswith(name + ".") for module in sys.modules):
            pytest.skip(f"{name} is loaded already")
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcuda.so.1: not found')\n")
    (package / "flash_mla.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = SglKernel()
    assert kernel._load() is None
    assert kernel._failure == (
        "sgl_kernel does not load: libcuda.so.1: not found; sgl_kernel holds no flash_mla.py with "
        "flashmla_ops"
    )
    with pytest.raises(RuntimeError, match="sgl_kernel does not load"):
        kernel.flash_mla_with_kvcache(request())


def request(**changes: object) -> DecodeRequest:
    some = torch.zeros(1)
    given = {"head_dim_v": 512, "tile_scheduler_metadata": some, "num_splits": some, **changes}
    return DecodeRequest(q=some, k_cache=some, block_table=some, cache_seqlens=some, **given)


def test_arguments_that_a_release_lacks() -> None:
    def old(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,  # type: ignore[no-untyped-def]
            num_splits, softmax_scale=None, causal=False):  # fmt: skip
        raise AssertionError("only its signature is looked at")

    assert "kv_format" not in wanted_arguments(request(), old)
    # Given, it must not be dropped: the call would compute something else.
    assert wanted_arguments(request(kv_format="V41"), old)["kv_format"] == "V41"
