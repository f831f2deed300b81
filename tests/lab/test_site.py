"""The stub packages of the lab's site folder, and its sitecustomize."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from padtrace.lab.environment import SITE


def test_the_stubs_are_on_no_path_of_ours() -> None:
    assert SITE not in [Path(entry or os.curdir).resolve() for entry in sys.path]


class TestSitecustomize:
    FINDER = (
        "import sys; print(any(type(f).__name__ == 'TorchvisionFinder' for f in sys.meta_path))"
    )

    def test_off_it_adds_no_finder(self, python_with_site: Callable[..., str]) -> None:
        assert python_with_site(self.FINDER) == "False"

    def test_on_it_waits_for_torchvision(self, python_with_site: Callable[..., str]) -> None:
        assert python_with_site(self.FINDER, PADTRACE_LAB="1") == "True"
        # torch costs seconds in processes that may never need it.
        loaded = python_with_site("import sys; print('torch' in sys.modules)", PADTRACE_LAB="1")
        assert loaded == "False"

    def test_the_one_it_shadows_still_runs(
        self, python_with_site: Callable[..., str], tmp_path: Path
    ) -> None:
        (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
        path = os.pathsep.join([str(SITE), str(tmp_path)])
        assert python_with_site("", PYTHONPATH=path, PADTRACE_LAB="1") == "theirs"


@pytest.mark.usefixtures("stubs")
class TestStubs:
    @pytest.fixture(autouse=True)
    def torch(self) -> None:
        pytest.importorskip("torch", reason="torch is not installed here")

    @pytest.mark.parametrize("splits", [3, 9])
    def test_num_splits_must_fit_q(self, splits: int) -> None:
        # sglang#30296: the plan knows fewer rows than q has; PR #34443: more.
        for call in (decode_with_tensors, decode_with_schedule):
            with pytest.raises(RuntimeError, match=r"^num_splits must have shape \(b\+1\)$"):
                call(q_rows=4, splits=splits, index_rows=4)

    @pytest.mark.parametrize("splits", [3, 5])
    def test_indices_are_looked_at_first(self, splits: int) -> None:
        for call in (decode_with_tensors, decode_with_schedule):
            with pytest.raises(RuntimeError, match=r"^indices must have shape \(b, s_q, topk\)$"):
                call(q_rows=4, splits=splits, index_rows=3)

    def test_shapes_that_fit_give_output_and_lse(self) -> None:
        for call in (decode_with_tensors, decode_with_schedule):
            assert call(q_rows=4, splits=5, index_rows=4) == ((4, 1, 64, 512), (4, 64, 1))

    def test_a_call_without_any_plan_is_refused(self) -> None:
        import torch
        from flash_mla import flash_mla_with_kvcache

        q, cache = torch.zeros(4, 1, 64, 576), torch.zeros(1)
        with pytest.raises(RuntimeError, match="num_splits"):
            flash_mla_with_kvcache(q, cache, None, None, 512, None)

    def test_a_plan_has_one_split_row_more_than_sequences(self) -> None:
        import flash_mla
        import torch
        from sgl_kernel.flash_mla import get_mla_metadata

        lengths = torch.tensor([3, 9, 4])
        for plan in (get_mla_metadata, flash_mla.get_mla_decoding_metadata):
            assert plan(lengths, 64, 1)[1].shape == (4,)

    def test_a_kernel_without_stand_in_raises_with_its_name(self) -> None:
        kernel = importlib.import_module("sgl_kernel").moe_align_block_size
        with pytest.raises(RuntimeError, match=r"sgl_kernel\.moe_align_block_size"):
            kernel(1)

    def test_greedy_verification_accepts_the_agreeing_start_of_each_chain(self) -> None:
        # Chains of 4. The target agrees with the first two drafts of chain 0, with none of chain 1.
        import sgl_kernel
        import torch

        predicts = torch.full((8,), -1)
        index, accepted = torch.full((2, 4), -1), torch.zeros(2, dtype=torch.long)
        sgl_kernel.verify_tree_greedy_cpu(
            predicts,
            index,
            accepted,
            candidates=torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]]),
            retrive_index=torch.arange(8).view(2, 4),
            retrive_next_token=torch.tensor([[1, 2, 3, -1]] * 2),
            retrive_next_sibling=torch.full((2, 4), -1),
            target_predict=torch.tensor([[11, 12, 99, 98], [77, 22, 23, 24]]),
        )
        assert predicts.tolist() == [11, 12, 99, -1, 77, -1, -1, -1]
        assert index.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
        assert accepted.tolist() == [2, 0]

    def test_cache_slots_go_into_the_pool_and_come_back(self) -> None:
        import sgl_kernel
        import torch

        pool = torch.zeros(3, 8, dtype=torch.int32)
        requests, start, end = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 1])
        slots = torch.tensor([50, 51, 60])
        sgl_kernel.assign_req_to_token_pool_cpu(requests, pool, start, end, slots, 8)
        assert pool.tolist() == [[60] + [0] * 7, [0] * 8, [0, 50, 51] + [0] * 5]
        back = torch.zeros(3, dtype=torch.long)
        sgl_kernel.assign_extend_cache_locs_cpu(requests, pool, start, end, back, 8)
        assert back.tolist() == [50, 51, 60]


Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def decode_with_tensors(*, q_rows: int, splits: int, index_rows: int) -> Shapes:
    """The call of releases that bring FlashMLA in sgl_kernel."""
    import torch
    from sgl_kernel.flash_mla import flash_mla_with_kvcache

    out, lse = flash_mla_with_kvcache(
        q=torch.zeros(q_rows, 1, 64, 576),
        k_cache=torch.zeros(1),
        block_table=None,
        cache_seqlens=torch.zeros(q_rows),
        head_dim_v=512,
        tile_scheduler_metadata=torch.zeros(132, 8),
        num_splits=torch.zeros(splits),
        indices=torch.zeros(index_rows, 1, 2048),
    )
    return tuple(out.shape), tuple(lse.shape)


def decode_with_schedule(*, q_rows: int, splits: int, index_rows: int) -> Shapes:
    """The call of newer releases, which pass the plan inside an object to the flash_mla wheel."""
    import torch
    from flash_mla import flash_mla_with_kvcache
    from flash_mla.flash_mla_interface import FlashMLASchedMeta

    out, lse = flash_mla_with_kvcache(
        q=torch.zeros(q_rows, 1, 64, 576),
        k_cache=torch.zeros(1),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=FlashMLASchedMeta(num_splits=torch.zeros(splits)),
        indices=torch.zeros(index_rows, 1, 2048),
        use_legacy=True,
    )
    return tuple(out.shape), tuple(lse.shape)
