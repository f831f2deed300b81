"""What findings say: what was raised, what happened, and values that mean something."""

from __future__ import annotations

from typing import Any

import pytest

from padtrace.contracts.engine import check
from padtrace.contracts.model import Finding
from padtrace.recording.model import Recording
from tests.contracts.builders import Server, batch


def raised(kind: str, message: str) -> Finding:
    server = Server()
    server.pad(batch("DECODE", 3, 3), batch("DECODE", 4, 4))
    server.add("error", function="post_forward_mlp_sync_batch", type=kind, message=message)
    return check(server.finish(), {"PT701"}).findings[0]


@pytest.mark.parametrize(
    ("kind", "message", "told", "none"),
    [
        ("AttributeError", "'NoneType' object has no attribute 'shape'", "is None", True),
        ("TypeError", "'NoneType' object is not subscriptable", "is None", True),
        (
            "AttributeError", "'EagleDraftInput' object has no attribute 'topk'",
            "AttributeError: 'EagleDraftInput' object has no attribute 'topk'", False,
        ),
        ("TypeError", "unsupported operand", "TypeError: unsupported operand", False),
        ("AttributeError", "blake2b:abcd", "whose text is not in the recording", False),
        ("TypeError", "", "whose text is not in the recording", False),
    ],
)  # fmt: skip
def test_an_error_says_what_was_raised(kind: str, message: str, told: str, none: bool) -> None:
    sentence = raised(kind, message).sentence
    assert told in sentence
    assert kind in sentence
    assert ("is None" in sentence) is none


def launched(q_rows: int, attn_cp: int = 1, **pad: Any) -> Recording:
    """A prefill of 5 rows padded to 12 and planned for them, of which a call got some."""
    server = Server(attn_cp=attn_cp, release="0.5.23")
    raw, padded = batch("EXTEND", 5, 1), batch("EXTEND", 12, 1)
    server.pad(raw, padded, forward=0, **pad)
    server.plan(12, padded, forward=0)
    server.add(
        "launch", forward=0, function="flash_mla_with_kvcache", q__shape=[q_rows, 1, 64, 576],
        num_splits__rows=13,
    )  # fmt: skip
    return server.finish()


def test_a_chain_tells_the_pad_as_it_was_and_then_the_call() -> None:
    # RadixAttention of 0.5.23 cuts q to the real rows; the pad made 12.
    (finding,) = check(launched(5), {"PT101"}).findings
    assert finding.left.chain == ["5", "prepare_mlp_sync_batch -> 12", "rows at the call -> 5"]
    assert "made 12 rows, of which q has 5" in finding.sentence


def test_only_context_parallel_ranks_have_rows_of_their_own() -> None:
    for attn_cp, told in ((1, False), (4, True)):
        (finding,) = check(launched(3, attn_cp), {"PT101"}).findings
        assert ("this rank's" in finding.sentence) is told
        assert ("this rank's shard -> 3" in finding.left.chain) is told


def test_a_pad_that_did_not_end_made_no_rows() -> None:
    server = Server()
    server.plan(5, batch("DECODE", 5, 5))
    server.add("pad", function="prepare_mlp_sync_batch", entry=batch("DECODE", 5, 5), forward=0)
    server.add(
        "launch", forward=0, function="flash_mla_with_kvcache", q__shape=[8, 1, 64, 576],
        num_splits__rows=6,
    )  # fmt: skip
    (finding,) = check(server.finish(), {"PT101"}).findings
    assert finding.left.chain == ["5", "rows at the call -> 8"]


def test_a_table_is_not_said_to_be_made_of_what_the_plan_met() -> None:
    server = Server()
    raw = batch("DRAFT_EXTEND_V2", 4, 1, 4)
    server.plan(16, raw, page_table_1__rows=3)
    server.pad(raw, batch("DRAFT_EXTEND_V2", 16, 4, 4))
    (finding,) = check(server.finish(), {"PT102"}).findings
    assert finding.right.chain[0] == "4 rows of input_ids at the plan before the pad"


@pytest.mark.parametrize(
    ("mine", "theirs", "values"),
    [([3, 6], [3, 5], (5, 6)), ([4, 5], [3, 5], (3, 4)), ([3, 5, 1], [3, 5], (0, 1))],
)
def test_counts_that_differ_are_told_by_the_first_that_does(
    mine: list[int], theirs: list[int], values: tuple[int, int]
) -> None:
    server = Server(ranks=2)
    # Vectors of their own, so that an index into their table is no count by chance.
    for filler in range(20):
        server.add("sync", 0, counts_before=[100 + filler], step=50 + filler)
    server.add("sync", 0, counts_before=theirs)
    server.add("sync", 1, counts_before=mine)
    (finding,) = check(server.finish(), {"PT401"}).findings
    assert (finding.left.value, finding.right.value) == values
    assert finding.sentence == f"rank 1 holds the counts {mine} where the others hold {theirs}"


def test_modes_are_told_by_name_in_json_too() -> None:
    server = Server()
    raw, padded = batch("DECODE", 3, 3), batch("EXTEND", 3, 3)
    server.pad(raw, padded)
    server.add("unpad", entry=padded, exit=padded)
    found = [f for f in check(server.finish(), {"PT601"}).findings if "mode" in f.left.name]
    (finding,) = [finding.as_json() for finding in found]
    assert (finding["left"]["value"], finding["right"]["value"]) == ("DECODE", "EXTEND")
    assert (
        finding["sentence"]
        == "forward_mode is EXTEND after the unpad and was DECODE before the pad"
    )


def test_padding_modes_are_told_by_name_in_json_too() -> None:
    server = Server(attn_tp=4)
    raw = batch("DECODE", 1, 1, global_num_tokens_cpu=[1, 1, 5])
    server.plan(1, raw)
    server.pad(raw, batch("DECODE", 8, 8, dp_padding_mode="MAX_LEN"))
    (finding,) = check(server.finish(), {"PT405"}).findings
    assert (finding.left.shown, finding.right.shown) == ("SUM_LEN", "MAX_LEN")
