"""Each further contract: a recording that breaks it, and one that keeps it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from padtrace.contracts.catalogue import CONTRACTS
from padtrace.contracts.engine import check
from padtrace.recording.absent import Absent
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


def padded_prefill(count: Any, mode: str = "MAX_LEN") -> Recording:
    """Five tokens padded to the twelve of the longest rank, as its pad left the count."""
    server = Server()
    raw = batch("EXTEND", 5, 1, num_token_non_padded_cpu=5)
    padded = batch("EXTEND", 12, 1, num_token_non_padded_cpu=count, dp_padding_mode=mode)
    server.pad(raw, padded)
    return server.finish()


def host_lengths(**wrong: Any) -> Recording:
    """A prefill of two requests, 5 and 4 new tokens behind 0 and 16 cached ones."""
    right = {
        "extend_seq_lens_cpu": [5, 4], "extend_prefix_lens_cpu": [0, 16],
        "extend_logprob_start_lens_cpu": [0, 16], "extend_num_tokens": 9,
        "seq_lens_cpu__rows": 2, "seq_lens_cpu__sum": 25, "seq_lens_sum": 25,
    }  # fmt: skip
    server = Server()
    rows = wrong.pop("rows", 9)
    server.add("batch", function="init_new", exit=batch("EXTEND", rows, 2, **{**right, **wrong}))
    return server.finish()


def prefill_of(lengths: list[int], mode: str = "EXTEND") -> Recording:
    server = Server()
    entry = batch(mode, sum(lengths), len(lengths), extend_seq_lens_cpu=lengths)
    server.add("forward", entry=entry, forward_mode=mode)
    return server.finish()


def logprob_width(width: int, mode: str = "TARGET_VERIFY", **more: Any) -> Recording:
    server = Server(**more)
    raw = batch(mode, 18, 3, 6, spec_info="EagleVerifyInput",
                spec_info__num_tokens_for_logprob_per_req=width)  # fmt: skip
    server.pad(raw, raw)
    return server.finish()


def left_over(second: list[int], *, planned: str = "ahead") -> Recording:
    """Two draft steps of 2 and 5 requests, padded to attention TP 4: [2, 5] becomes [8, 8]."""
    server = Server(ranks=1, attn_tp=4, facts={"workers": {"draft": {"backend": BACKEND}}})
    own: dict[str, Any] = {"worker": "draft"}

    def entry(counts: list[int]) -> dict[str, Any]:
        return batch("DECODE", 2, 2, global_num_tokens_cpu=counts)

    padded = batch("DECODE", 8, 8, global_num_tokens_cpu=[8, 8])
    for step in (0, 1) if planned == "ahead" else (0,):
        server.plan(5, entry([2, 5]), draft_step=step, **own)
    server.pad(entry([2, 5]), padded, draft_step=0, **own)
    if planned != "ahead":
        server.plan(8, entry(second), draft_step=1, **own)
    server.pad(entry(second), padded, draft_step=1, **own)
    return server.finish()


EXAMPLES = {
    "PT102": (page_table(3), page_table(16)),
    "PT103": (one_view(5), one_view(17)),
    "PT104": (launch(cache_seqlens__rows=3), launch(cache_seqlens__rows=4)),
    "PT105": (launch(indices__shape=[3, 1, 2048]), launch(indices__shape=[4, 1, 2048])),
    "PT106": (padded_fields(3), padded_fields(4)),
    "PT107": (host_lengths(extend_num_tokens=12), host_lengths()),
    "PT1003": (padded_prefill(None), padded_prefill(5)),
    "PT1202": (prefill_of([5, 0]), prefill_of([5, 1])),
    "PT1203": (logprob_width(1), logprob_width(6)),
    "PT804": (left_over([8, 8], planned="again"), left_over([2, 5], planned="again")),
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


@pytest.mark.parametrize("count", [None, 12, 13, Absent.NO_ATTRIBUTE])
def test_padded_prefill_rows_that_a_router_takes_for_real_are_a_suspect(count: Any) -> None:
    (finding,) = check(padded_prefill(count), {"PT1003"}).findings
    assert finding.severity.value == "suspect"
    assert "7 of 12 rows of EXTEND (target worker) belong to nobody" in finding.sentence
    assert check(padded_prefill(count), {"PT1003"}).notes == []


def test_masked_padding_of_a_prefill_is_one_line() -> None:
    report = check(padded_prefill(5))
    assert report.findings == []
    (note,) = report.notes
    assert note.startswith(
        "7 of 12 rows of a padded prefill belong to nobody, and the routing mask"
    )


@pytest.mark.parametrize("count", [5, 12, None])
def test_a_prefill_padded_by_its_own_rank_alone_is_not_meant(count: Any) -> None:
    # Under SUM_LEN it is padded to attention TP only, fewer rows than ranks.
    report = check(padded_prefill(count, "SUM_LEN"), {"PT1003"})
    assert (report.findings, report.notes, report.evaluated["PT1003"]) == ([], [], 0)


@pytest.mark.parametrize(("bound", "broken"), [(2, True), (3, False), (4, True), (8, True)])
def test_the_routing_bound_is_the_number_of_real_rows(bound: int, broken: bool) -> None:
    assert bool(check(routing(bound), {"PT1001"}).findings) is broken


@pytest.mark.parametrize("bound", [0, 12])
def test_an_idle_rank_beside_a_prefill_may_count_its_made_up_request(bound: int) -> None:
    # 0.5.16 to 0.5.20 set it to all rows so that experts do not starve, 0.5.23 to none.
    server = Server()
    padded = batch("EXTEND", 12, 1, num_token_non_padded_cpu=bound, dp_padding_mode="MAX_LEN")
    server.pad(batch("IDLE", 0, 0, num_token_non_padded_cpu=0), padded)
    assert check(server.finish(), {"PT1001", "PT1003"}).findings == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 12},
        {"extend_num_tokens": 8},
        {"extend_seq_lens_cpu": [5, 3]},
        {"extend_prefix_lens_cpu": [0]},
        {"extend_prefix_lens_cpu": [0, 15]},
        {"extend_logprob_start_lens_cpu": [0, 16, 0]},
        {"seq_lens_cpu__rows": 3},
        {"seq_lens_cpu__sum": 24},
        {"seq_lens_sum": 26},
    ],
    ids=str,
)
def test_each_contradiction_of_the_host_lengths_is_found(wrong: dict[str, Any]) -> None:
    findings = check(host_lengths(**wrong), {"PT107"}).findings
    assert findings
    assert all("contradict each other" in finding.sentence for finding in findings)


def test_a_mixed_batch_may_be_one_step_ahead() -> None:
    server = Server()
    lengths = {
        "extend_seq_lens_cpu": [5, 1], "extend_prefix_lens_cpu": [0, 16], "extend_num_tokens": 6,
        "seq_lens_cpu__rows": 2, "seq_lens_cpu__sum": 21,
    }  # fmt: skip
    server.add("batch", function="init_new", exit=batch("MIXED", 6, 2, **lengths))
    assert check(server.finish(), {"PT107"}).findings == []


@pytest.mark.parametrize("mode", ["DRAFT_EXTEND_V2", "IDLE", "DECODE"])
def test_only_a_prefill_takes_its_result_from_the_last_row(mode: str) -> None:
    report = check(prefill_of([5, 0], mode), {"PT1202"})
    assert (report.findings, report.evaluated["PT1202"]) == ([], 0)


@pytest.mark.parametrize("width", [1, 5, 7])
def test_the_logprob_width_is_held_both_ways(width: int) -> None:
    (finding,) = check(logprob_width(width), {"PT1203"}).findings
    assert (finding.left.value, finding.right.value) == (6, width)


@pytest.mark.parametrize(("width", "found"), [(1, 0), (6, 0), (5, 1), (7, 1)])
def test_a_draft_extend_may_keep_one_row_per_request(width: int, found: int) -> None:
    # LogitsMetadata.draft_extend_select_index
    report = check(logprob_width(width, "DRAFT_EXTEND_V2"), {"PT1203"})
    assert len(report.findings) == found


def test_logprob_widths_of_prefills_and_multi_layer_drafts_are_their_own() -> None:
    several = {"server_args": {"enable_multi_layer_eagle": True}}
    for recording in (logprob_width(1, "EXTEND"), logprob_width(1, facts=several)):
        assert check(recording, {"PT1203"}).evaluated["PT1203"] == 0


def test_counts_left_over_do_no_harm_where_all_steps_were_planned_ahead() -> None:
    report = check(left_over([8, 8]), {"PT804"})
    assert (report.findings, len(report.tolerated)) == ([], 1)
    again = check(left_over([8, 8], planned="again"), {"PT804"})
    assert [finding.severity.value for finding in again.findings] == ["suspect"]


def test_a_table_is_judged_without_num_splits_too() -> None:
    # A DSA backend whose kernel takes no num_splits still makes a table for every row of q.
    server = Server()
    raw, padded = batch("DRAFT_EXTEND_V2", 4, 1, 4), batch("DRAFT_EXTEND_V2", 16, 4, 4)
    server.add("plan", backend=BACKEND, function="init_forward_metadata", entry=raw,
               page_table_1__rows=3, num_splits__rows=None)  # fmt: skip
    server.pad(raw, padded)
    report = check(server.finish(), {"PT102"})
    assert [finding.right.value for finding in report.findings] == [3]


@pytest.mark.parametrize(("tables", "found"), [(8, []), (7, [7])])
def test_branches_of_a_draft_share_the_table_of_their_request(
    tables: int, found: list[int]
) -> None:
    """Top-k 4: eight requests are 32 rows of q."""
    server = Server(facts={"workers": {"draft": {"topk": 4}}})
    raw = batch("DECODE", 32, 8, 4)
    server.plan(32, raw, worker="draft", page_table_1__rows=tables)
    server.pad(raw, raw, worker="draft")
    report = check(server.finish(), {"PT102"})
    assert [finding.right.value for finding in report.findings] == found


def test_rows_of_a_draft_with_branches_are_requests_times_top_k() -> None:
    facts = {"workers": {"draft": {"topk": 4}}}
    for given, right in ((40, 32), (32, 32)):
        server = Server(facts=facts)
        raw, padded = batch("DECODE", 32, 8, 4), batch("DECODE", 40, 10, 4)
        server.pad(raw, padded, worker="draft")
        server.add("unpad", worker="draft", entry=padded, exit=raw, logits_before__rows=40,
                   logits_after__rows=given)  # fmt: skip
        findings = check(server.finish(), {"PT602"}).findings
        assert [finding.right.expected for finding in findings] == ([right] if given != 32 else [])


def test_planned_branches_are_no_other_padding_mode() -> None:
    # Planned for 8 x 4 rows under SUM_LEN, while the batch still holds 8 and the other rank 6.
    server = Server(facts={"workers": {"draft": {"topk": 4}}})
    raw = batch("DECODE", 8, 8, 4, global_num_tokens_cpu=[32, 24])
    server.plan(32, raw, worker="draft")
    server.pad(raw, batch("DECODE", 32, 8, 4, dp_padding_mode="SUM_LEN"), worker="draft")
    assert check(server.finish(), {"PT405"}).findings == []


@pytest.mark.parametrize(("after", "found"), [(None, 0), (3, 1)])
def test_none_that_comes_back_as_a_value_is_not_restored(after: int | None, found: int) -> None:
    server = Server()
    raw = batch("TARGET_VERIFY", 18, 3, 6, mrope_positions__rows=None)
    server.pad(raw, raw)
    server.add("unpad", entry=raw, exit={**raw, "mrope_positions.rows": after})
    findings = check(server.finish(), {"PT601"}).findings
    assert len(findings) == found
    for finding in findings:
        assert finding.left.value is None
        assert "was None before the pad" in finding.sentence
        assert finding.as_json()["left"]["value"] is None


def prefill_beside_idle(first: int, second: int, vote: int) -> Recording:
    server = Server(ranks=2)
    for rank, (mode, choice) in enumerate((("EXTEND", first), ("IDLE", second))):
        own = {"is_extend_in_batch": 1, "can_run_dp_breakable_cuda_graph": vote}
        rows = 5 if mode == "EXTEND" else 0
        server.add("forward", rank, forward=0, forward_mode=mode, can_run_graph=choice)
        padded = batch("EXTEND", 16, 1, dp_padding_mode="MAX_LEN", **own)
        server.pad(batch(mode, rows, 1, **own), padded, rank, forward=0)
    return server.finish()


@pytest.mark.parametrize(
    ("first", "second", "vote", "found"),
    [(1, 0, 1, 1), (1, 1, 1, 0), (0, 0, 1, 0), (1, 0, 0, 0)],
)
def test_an_idle_rank_runs_the_prefill_graph_the_group_voted_for(
    first: int, second: int, vote: int, found: int
) -> None:
    report = check(prefill_beside_idle(first, second, vote), {"PT403"})
    assert len(report.findings) == found
