"""Stand-ins that compute: against values worked out by hand."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here")

from padtrace.lab.standins import targets  # noqa: E402
from padtrace.lab.standins.communication import memcpy_rows  # noqa: E402
from padtrace.lab.standins.indexer_kernels import (  # noqa: E402
    fast_topk_transform_fused,
    fp8_paged_mqa_logits,
    fused_store_index_k_cache,
)
from padtrace.lab.standins.kv_cache import (  # noqa: E402
    quantize_k_cache_separate,
    set_mla_kv_buffer,
)
from padtrace.lab.standins.seqlens_expand import seqlens_expand  # noqa: E402


def test_seqlens_expand_counts_up_to_each_length() -> None:
    # Two new tokens of a request of 5: they see 4 and 5. Three of 3: 1, 2, 3. None of 7.
    extend, lengths = torch.tensor([2, 3, 0]), torch.tensor([5, 3, 7])
    assert seqlens_expand(extend, lengths, 5, 3).tolist() == [4, 5, 1, 2, 3]


def test_kv_rows_land_in_their_slots_and_spare_rows_are_dropped() -> None:
    buffer = torch.zeros(4, 1, 3)
    nope = torch.tensor([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]])
    rope = torch.tensor([[5.0], [6.0], [9.0]])
    set_mla_kv_buffer(buffer, torch.tensor([2, 0]), nope, rope)
    expected = [[3.0, 4.0, 6.0], [0.0, 0.0, 0.0], [1.0, 2.0, 5.0], [0.0, 0.0, 0.0]]
    assert buffer.view(4, 3).tolist() == expected


def test_fewer_kv_rows_than_slots_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 locations"):
        set_mla_kv_buffer(
            torch.zeros(4, 1, 3), torch.tensor([2, 0]), torch.zeros(1, 2), torch.zeros(1, 1)
        )


def test_quantised_row_has_the_bytes_of_the_fp8_mla_layout() -> None:
    # 512 fp8 values and four float32 scales; the rope part is 64 bf16 values, untouched.
    rope = torch.arange(64, dtype=torch.bfloat16).expand(3, 64)
    nope_bytes, rope_bytes = quantize_k_cache_separate(torch.ones(3, 512), rope)
    assert nope_bytes.shape == (3, 1, 512 + 4 * 4)
    assert torch.equal(rope_bytes.view(torch.bfloat16).view(3, 64), rope)
    # All ones: the scale is 1/448, and every value becomes 448, the largest of e4m3.
    assert nope_bytes[0, 0, :512].view(torch.float8_e4m3fn).float().unique().tolist() == [448.0]
    scales = nope_bytes[0, 0, 512:].view(torch.float32)
    assert torch.allclose(scales, torch.full((4,), 1 / 448))


def test_index_key_is_stored_values_first_then_scales() -> None:
    cache = torch.zeros(2, 64 * (128 + 4), dtype=torch.uint8)
    fused_store_index_k_cache(torch.ones(1, 128), cache, torch.tensor([65]), 64)
    assert not cache[0].any()  # slot 65 is token 1 of page 1
    values = cache[1, 128:256].view(torch.float8_e4m3fn).float()
    assert values.unique().tolist() == [448.0]
    scale = cache[1, 64 * 128 + 4 : 64 * 128 + 8].view(torch.float32)
    assert scale.item() == pytest.approx(1 / 448)


def test_index_keys_and_locations_must_have_the_same_rows() -> None:
    cache = torch.zeros(1, 64 * 132, dtype=torch.uint8)
    with pytest.raises(ValueError, match="2 keys for 3 locations"):
        fused_store_index_k_cache(torch.ones(2, 128), cache, torch.tensor([0, 1, 2]), 64)


def test_topk_maps_query_rows_to_their_request() -> None:
    # Request 0 has two query rows, request 1 one; each sees its first `lengths` slots.
    table = torch.tensor([[70, 71, 72], [80, 81, 82]])
    chosen = fast_topk_transform_fused(
        torch.zeros(3, 3), torch.tensor([1, 2, 3]), table, torch.tensor([0, 2, 3]), 4
    )
    assert chosen.tolist() == [[70, -1, -1, -1], [70, 71, -1, -1], [80, 81, 82, -1]]


@pytest.mark.parametrize("rows", [(1, 2, 4), (2, 1, 4), (2, 2, 2)])
def test_paged_logits_refuse_rows_that_do_not_fit(rows: tuple[int, int, int]) -> None:
    lengths, tables, weights = rows
    with pytest.raises(ValueError, match="fp8_paged_mqa_logits"):
        fp8_paged_mqa_logits(
            torch.zeros(2, 2, 32, 128),
            torch.zeros(1),
            torch.zeros(weights, 32),
            torch.zeros(lengths),
            torch.zeros(tables, 1),
            torch.zeros(1),
            64,
        )


def test_memcpy_takes_its_offset_in_the_named_tensor() -> None:
    whole = torch.arange(10).view(5, 2)
    mine = torch.zeros(3, 2, dtype=torch.long)
    memcpy_rows(mine, whole, 0, torch.tensor(2), torch.tensor(2), True)
    assert mine.tolist() == [[4, 5], [6, 7], [0, 0]]
    gathered = torch.zeros(5, 2, dtype=torch.long)
    memcpy_rows(gathered, mine, 0, torch.tensor(3), torch.tensor(2), False)
    assert gathered.tolist() == [[0, 0], [0, 0], [0, 0], [4, 5], [6, 7]]


def test_a_missing_module_is_none_and_a_broken_one_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_for_test.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert targets.module_if_present("no_such_package.inner") is None
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        targets.module_if_present("broken_for_test")


def test_nothing_is_replaced_where_nothing_is() -> None:
    with pytest.raises(LookupError, match="no_such_kernel"):
        targets.replace(targets, "no_such_kernel", None)
