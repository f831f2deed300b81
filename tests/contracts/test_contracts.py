"""Each further contract: a recording that breaks it, and one that keeps it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from padtrace.contracts.catalogue import CONTRACTS
from padtrace.contracts.engine import check
from padtrace.recording.model import Recording
from padtrace.recording.value_tensors import ValueKey, ValueTensor
from tests.contracts.builders import BACKEND, Server, batch

# Contracts that need values which tier `shape` does not hold.
NEED_VALUES = {"PT1002", "PT1101"}
# Those that no recorder gives the values for yet.
NEVER_EVALUATED = {"PT1101"}


def page_table(rows: int) -> Recording:
    server = Server()
    raw, padded = batch("DRAFT_EXTEND_V2", 4, 1, 4), batch("DRAFT_EXTEND_V2", 16, 4, 4)
    server.plan(16, raw, page_table_1__rows=rows)
    server.pad(raw, padded)
    return server.finish()


def one_view(running_sum: int) -> Recording:
    server = Server()
    raw = batch("DRAFT_EXTEND_V2", 16, 4, 4)
    server.plan(16, raw, page_table_1__rows=16, cu_seqlens_q__rows=running_sum)
    return server.finish()


def launch(**shapes: Any) -> Recording:
    server = Server()
    server.add(
        "launch", function="flash_mla_with_kvcache", q__shape=[4, 1, 64, 576],
        num_splits__rows=5, **shapes,
    )  # fmt: skip
    return server.finish()


def padded_fields(positions: int) -> Recording:
    server = Server()
    server.pad(batch("DECODE", 3, 3), batch("DECODE", 4, 4, positions__rows=positions))
    return server.finish()


def padded_slots(*slots: int, page_size: int = 1) -> Recording:
    """A decode of three requests padded to four rows or more, with the slots it writes to."""
    facts = {"workers": {"target": {"page_size": page_size}}}
    server = Server(facts=facts)
    seq = server.pad(batch("DECODE", 3, 3), batch("DECODE", len(slots), len(slots)))
    recording = server.finish()
    kept = ValueTensor(np.array(slots, dtype=np.int64), "int64")
    recording.values[ValueKey(0, seq, "exit.out_cache_loc")] = kept
    return recording


def graph(judged: int, sized: int, bucket: int, *, allowed: int = 1) -> Recording:
    server = Server()
    shared: dict[str, Any] = {"runner": "EAGLEDraftCudaGraphRunner", "raw_bs": 4, "max_bs": 32}
    server.add("graph", function="can_run", verdict=allowed, bucket_argument=judged, **shared)
    server.add("graph", function="execute", bucket_argument=sized, bucket=bucket, **shared)
    return server.finish()


def graph_plan(**values: Any) -> Recording:
    server = Server()
    server.add(
        "plan", backend=BACKEND, function="init_forward_metadata_out_graph",
        entry=batch("TARGET_VERIFY", 18, 3, 6), **values,
    )  # fmt: skip
    return server.finish()


def ranks(kind: str, first: dict[str, Any], second: dict[str, Any]) -> Recording:
    server = Server(ranks=2)
    server.add(kind, 0, **first)
    server.add(kind, 1, **second)
    return server.finish()


def buffers(first: int, second: int) -> Recording:
    raw = batch("DECODE", 3, 3)
    sides = [
        {"function": "prepare_mlp_sync_batch", "entry": raw,
         "exit": batch("DECODE", 4, 4, global_dp_buffer_len=length)}
        for length in (first, second)
    ]  # fmt: skip
    return ranks("pad", *sides)


def graph_or_eager(first: int, second: int) -> Recording:
    sides = [{"forward_mode": "DECODE", "can_run_graph": choice} for choice in (first, second)]
    return ranks("forward", *sides)


def counts(first: list[int], second: list[int]) -> Recording:
    return ranks("sync", {"counts_before": first}, {"counts_before": second})


def scheduler_list(changed: int) -> Recording:
    server = Server()
    raw = batch("DECODE", 3, 3, global_num_tokens_cpu=[3, 5])
    padded = batch("DECODE", 4, 4, global_num_tokens_cpu=[4, 8])
    server.pad(raw, padded, scheduler_list_changed=changed)
    return server.finish()


def padding_mode(mode: str) -> Recording:
    server = Server(attn_tp=4)
    raw = batch("DECODE", 1, 1, global_num_tokens_cpu=[1, 1, 5])
    server.plan(1, raw)
    server.pad(raw, batch("DECODE", 8, 8, dp_padding_mode=mode))
    return server.finish()


def owned(requests: int, rows: int) -> Recording:
    server = Server()
    server.pad(batch("TARGET_VERIFY", 18, 3, 6), batch("TARGET_VERIFY", rows, requests, 6))
    return server.finish()


def scaled(rows: int) -> Recording:
    server = Server()
    server.add("forward", entry=batch("TARGET_VERIFY", rows, 3, 6), forward_mode="TARGET_VERIFY")
    return server.finish()


def captured(width: int) -> Recording:
    server = Server()
    server.add(
        "graph", runner="DecodeCudaGraphRunner", function="can_run_graph",
        entry=batch("TARGET_VERIFY", 18, 3, 6), num_tokens_per_bs=width,
    )  # fmt: skip
    return server.finish()


def unpadded(requests: int, **values: Any) -> Recording:
    server = Server()
    raw, padded = batch("DECODE", 3, 3), batch("DECODE", 8, 8)
    server.pad(raw, padded)
    server.add("unpad", entry=padded, exit=batch("DECODE", 8, requests), **values)
    return server.finish()


def sums(carried: int) -> Recording:
    server = Server()
    raw = batch("DECODE", 3, 3, seq_lens_sum=300, seq_lens_cpu__sum=300)
    padded = batch("DECODE", 8, 8, seq_lens_sum=carried, seq_lens_cpu__sum=305)
    server.pad(raw, padded)
    return server.finish()


def error(kind: str | None) -> Recording:
    server = Server()
    server.pad(batch("DECODE", 3, 3), batch("DECODE", 4, 4))
    if kind:
        server.add("error", function="post_forward_mlp_sync_batch", type=kind, message="")
    return server.finish()


def marked(rows: int) -> Recording:
    server = Server()
    raw = batch("DECODE", 3, 3)
    server.add("ready", planned_bs=3, planned_num_tokens=rows, replan_equivalent=0)
    server.pad(raw, batch("DECODE", 4, 4))
    return server.finish()


def draft_steps(second: int) -> Recording:
    server = Server()
    for step, rows in enumerate((5, second)):
        server.plan(rows, batch("DECODE", 2, 2), worker="draft", draft_step=step)
    return server.finish()


def lists(after: int) -> Recording:
    server = Server()
    raw = batch("DRAFT_EXTEND_V2", 4, 1, 4, extend_seq_lens_cpu=[4])
    server.pad(raw, batch("DRAFT_EXTEND_V2", 16, 4, 4), **{"owner.extend_seq_lens_cpu.rows": after})
    return server.finish()


def table_width(width: int) -> Recording:
    server = Server()
    server.plan(4, batch("DECODE", 4, 4), page_table_1__width=width, max_seq_len_k=202_754)
    return server.finish()


def request_table(width: int) -> Recording:
    server = Server(facts={"workers": {"target": {"req_to_token_shape": [32, width]}}})
    server.plan(4, batch("DECODE", 4, 4), max_seq_len_k=256_001)
    return server.finish()


def routing(bound: int) -> Recording:
    server = Server()
    raw = batch("DECODE", 3, 3)
    server.pad(raw, batch("DECODE", 8, 8, num_token_non_padded_cpu=bound))
    return server.finish()


def logprobs(rows: int) -> Recording:
    server = Server()
    server.add("sync", counts_after=[8], logprob_counts_after=[rows])
    return server.finish()


EXAMPLES = {
    "PT102": (page_table(3), page_table(16)),
    "PT103": (one_view(5), one_view(17)),
    "PT104": (launch(cache_seqlens__rows=3), launch(cache_seqlens__rows=4)),
    "PT105": (launch(indices__shape=[3, 1, 2048]), launch(indices__shape=[4, 1, 2048])),
    "PT106": (padded_fields(3), padded_fields(4)),
    "PT1002": (padded_slots(64, 65, 66, 65), padded_slots(64, 65, 66, 0, 0)),
    "PT301": (graph(4, 16, 16), graph(4, 4, 4)),
    "PT302": (graph(4, 4, 2), graph(4, 4, 4)),
    "PT303": (
        graph_plan(graph_bucket=4, num_splits_slice__rows=17, num_splits_slice__wanted=25),
        graph_plan(graph_bucket=4, num_splits_slice__rows=25, num_splits_slice__wanted=25),
    ),
    "PT304": (
        graph_plan(graph_bucket=4, num_splits__rows=19),
        graph_plan(graph_bucket=4, num_splits__rows=25),
    ),
    "PT401": (counts([3, 5], [3, 6]), counts([3, 5], [3, 5])),
    "PT402": (buffers(258, 44), buffers(258, 258)),
    "PT403": (graph_or_eager(1, 0), graph_or_eager(1, 1)),
    "PT404": (scheduler_list(1), scheduler_list(0)),
    "PT405": (padding_mode("MAX_LEN"), padding_mode("SUM_LEN")),
    "PT501": (owned(3, 20), owned(4, 24)),
    "PT502": (scaled(15), scaled(18)),
    "PT503": (captured(4), captured(6)),
    "PT601": (unpadded(8), unpadded(3)),
    "PT602": (
        unpadded(3, logits_before__rows=8, logits_after__rows=8),
        unpadded(3, logits_before__rows=8, logits_after__rows=3),
    ),
    "PT603": (sums(306), sums(305)),
    "PT701": (error("AttributeError"), error(None)),
    "PT702": (error("IndexError"), error(None)),
    "PT801": (marked(3), marked(4)),
    "PT802": (draft_steps(8), draft_steps(5)),
    "PT803": (lists(4), lists(1)),
    "PT901": (table_width(202_752), table_width(202_754)),
    "PT902": (request_table(256_000), request_table(256_004)),
    "PT1001": (routing(2), routing(3)),
    "PT1201": (logprobs(12), logprobs(8)),
}


def test_every_contract_has_an_example() -> None:
    assert EXAMPLES.keys() | NEVER_EVALUATED | {"PT101"} == CONTRACTS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_broken_rule_is_found_and_told(name: str) -> None:
    broken, _ = EXAMPLES[name]
    report = check(broken, {name}, strict=True)
    assert report.verdict == "divergent"
    finding = report.findings[0]
    assert finding.contract == name
    assert finding.sentence
    assert "None" not in finding.sentence.replace("is None", "")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_kept_rule_is_evaluated_and_clean(name: str) -> None:
    _, kept = EXAMPLES[name]
    report = check(kept, {name}, strict=True)
    if name == "PT601":
        # input_ids stays padded in every release; strict says so.
        assert {f.right.name for f in report.findings} == {"input_ids.rows after the unpad"}
        return
    assert (report.verdict, report.findings) == ("clean", [])
    assert report.evaluated[name] >= 1


@pytest.mark.parametrize("name", sorted(NEED_VALUES))
def test_what_needs_values_says_what_to_turn_on(name: str) -> None:
    report = check(padded_fields(4), {name})
    assert report.verdict == "nothing-observed"
    assert "--tier meta" in next(iter(report.skipped[name]))


@pytest.mark.parametrize(
    ("slots", "page_size", "found"),
    [
        ((64, 65, 66), 1, []),  # not padded
        ((64, 65, 66, -1), 1, []),  # taken by no writer
        ((64, 65, 66, 63), 64, []),  # the first page is reserved whole
        ((64, 65, 66, 0, 64), 64, [64]),
        ((0, 0, 0, 1), 1, [1]),
    ],
)
def test_padded_rows_may_write_to_the_reserved_page(
    slots: tuple[int, ...], page_size: int, found: list[int]
) -> None:
    report = check(padded_slots(*slots, page_size=page_size), {"PT1002"})
    assert report.evaluated["PT1002"] == 1
    assert [finding.right.value for finding in report.findings] == found
    assert all("is not reserved" in finding.sentence for finding in report.findings)


def test_a_source_of_one_entry_is_named() -> None:
    recording = graph_plan(
        graph_bucket=4, num_splits__rows=1, num_splits_slice__rows=25, num_splits_slice__wanted=25
    )
    report = check(recording, {"PT303"})
    assert "every row got the same value" in report.findings[0].sentence


def test_a_refused_graph_is_not_compared() -> None:
    assert check(graph(40, 16, 16, allowed=0), {"PT301"}).findings == []


def test_rows_of_real_requests_are_never_tolerated() -> None:
    report = check(page_table(3), {"PT102"})
    assert report.verdict == "divergent"
    assert report.findings[0].severity.value == "silent"


def test_rocm_does_not_fill_short_tables() -> None:
    server = Server(device="hip")
    raw, padded = batch("IDLE", 0, 0), batch("IDLE", 20, 3)
    server.plan(20, padded, page_table_1__rows=3)
    server.pad(raw, padded)
    report = check(server.finish(), {"PT102"})
    assert report.verdict == "divergent"
    assert "sglang#34455" in report.findings[0].known_reports


def test_cases_of_other_counts_are_not_ranks_of_one_step() -> None:
    facts = {"case": {"cases": []}}
    server = Server(ranks=2, facts=facts)
    for rank, length in ((0, 258), (1, 44)):
        server.add("sync", rank, counts_before=[3, 40 + rank])
        server.pad(batch("DECODE", 3, 3), batch("DECODE", 4, 4, global_dp_buffer_len=length), rank)
    assert check(server.finish(), {"PT402"}).findings == []
