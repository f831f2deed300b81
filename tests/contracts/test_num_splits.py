"""PT101 on numbers of public reports and of measured cases."""

from __future__ import annotations

import numpy as np
import pytest

from padtrace.contracts import num_splits, wording
from padtrace.contracts.engine import check
from padtrace.contracts.evidence import Evidence
from padtrace.contracts.num_splits import row_pairs
from padtrace.recording import schema
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.model import Recording
from tests.contracts.builders import Server, agreeing, batch, report_30296, report_34443


def only_finding(recording: Recording):
    report = check(recording, {"PT101"})
    assert report.verdict == "divergent"
    assert len(report.findings) == 1
    return report.findings[0]


@pytest.mark.parametrize(
    ("q", "planned", "requests", "attn_tp", "splits", "needs"),
    [(8, 6, 1, 8, 7, 9), (20, 18, 3, 4, 19, 21)],
)
def test_30296_is_found_and_named(q, planned, requests, attn_tp, splits, needs) -> None:
    finding = only_finding(report_30296(q, planned, requests, attn_tp))
    assert (finding.left.value, finding.right.value, finding.right.expected) == (q, splits, needs)
    assert finding.sign == "shorter"
    assert finding.planned == "before the pad"
    assert "sglang#30296" in finding.known_reports
    assert finding.sentence == (
        f"num_splits {splits}, needs {needs}: the FlashMLA metadata of DRAFT_EXTEND_V2 (draft "
        f"worker) were planned for {planned} rows before the pad made q {q} rows"
    )


def test_34443_is_found_with_the_other_sign() -> None:
    finding = only_finding(report_34443())
    assert (finding.left.value, finding.right.value, finding.right.expected) == (6, 9, 7)
    assert finding.sign == "longer"
    assert finding.planned == "after the pad"
    assert finding.known_reports == ["sglang#34443"]
    assert "left q at 6 rows" in finding.sentence


def test_agreement_is_clean_and_counted() -> None:
    report = check(agreeing(), {"PT101"})
    assert (report.verdict, report.evaluated["PT101"], report.findings) == ("clean", 1, [])


def test_a_recorded_call_is_judged_by_its_own_numbers() -> None:
    server = Server(attn_tp=2)
    raw, padded = batch("DECODE", 1, 1), batch("DECODE", 2, 2)
    server.plan(1, raw, worker="draft")
    server.pad(raw, padded, worker="draft", forward=0)
    server.add(
        "launch", worker="draft", forward=0, function="flash_mla_with_kvcache",
        q__shape=[2, 1, 64, 576], num_splits__rows=2, failed=1,
    )  # fmt: skip
    report = check(server.finish(), {"PT101"})
    assert report.evaluated["PT101"] == 1
    finding = report.findings[0]
    assert (finding.event, finding.left.value, finding.right.value) == ("launch", 2, 2)
    assert finding.outcome.startswith("the kernel stopped")


def test_a_call_that_names_its_plan_is_judged_by_that_one_and_never_by_the_latest() -> None:
    """A patched live server: four step backends planned (2), another object again after the pad
    (3), and the kernel was given the older plan."""
    server = Server(attn_tp=2)
    raw, padded = batch("DECODE", 1, 1), batch("DECODE", 2, 2)
    older = server.plan(1, raw, worker="draft")
    server.pad(raw, padded, worker="draft", forward=0)
    server.plan(2, padded, worker="draft", forward=0)
    server.add(
        "launch", worker="draft", forward=0, function="flash_mla_with_kvcache",
        q__shape=[2, 1, 64, 576], num_splits__rows=2, failed=1, plan_seq=older,
    )  # fmt: skip
    finding = only_finding(server.finish())
    assert (finding.left.value, finding.right.value, finding.right.expected) == (2, 2, 3)
    assert finding.planned == "before the pad"


def test_each_draft_step_works_with_its_own_plan() -> None:
    # sglang's second draft step is planned on padded counts: 6 for 8 rows, then 9 for 8.
    server = Server(attn_tp=4)
    raw, padded = batch("DECODE", 2, 2), batch("DECODE", 8, 8)
    for step, planned in ((0, 5), (1, 8)):
        server.plan(planned, raw, worker="draft", draft_step=step)
        server.pad(raw, padded, worker="draft", draft_step=step, forward=step)
        server.add("unpad", worker="draft", draft_step=step, forward=step)
    report = check(server.finish(), {"PT101"})
    assert report.evaluated["PT101"] == 2
    assert [finding.draft_step for finding in report.findings] == [0]
    assert report.findings[0].right.value == 6


def test_all_steps_planned_ahead_are_told_apart() -> None:
    server = Server()
    raw = batch("DECODE", 3, 3)
    for step in range(3):
        server.plan(3 + step, raw, worker="draft", draft_step=step)
    for step in range(3):
        padded = batch("DECODE", 3 + step, 3 + step)
        server.pad(raw, padded, worker="draft", draft_step=step, forward=step)
    assert check(server.finish(), {"PT101"}).verdict == "clean"


def test_a_plan_made_again_after_the_pad_counts() -> None:
    server = Server(attn_tp=4)
    raw, padded = batch("TARGET_VERIFY", 18, 3, 6), batch("TARGET_VERIFY", 20, 3, 6)
    server.plan(18, raw)
    server.pad(raw, padded, forward=0)
    server.plan(20, padded, forward=0)
    assert check(server.finish(), {"PT101"}).verdict == "clean"


def test_the_plan_of_another_batch_or_rank_does_not_count() -> None:
    server = Server(ranks=2)
    raw = batch("DECODE", 4, 4)
    server.plan(4, raw, rank=1)
    server.plan(4, raw, batch=7)
    server.pad(raw, raw, forward=0)
    report = check(server.finish(), {"PT101"})
    assert report.evaluated["PT101"] == 0
    assert report.skipped["PT101"] == {num_splits.NO_PLAN: 1}
    assert report.verdict == "nothing-observed"


def test_a_forward_in_a_graph_is_skipped_with_its_reason() -> None:
    server = Server()
    raw = batch("DECODE", 4, 4)
    server.plan(3, raw)
    server.add("forward", forward=0, entry=raw, forward_mode="DECODE", can_run_graph=1)
    report = check(server.finish(), {"PT101"})
    assert report.skipped["PT101"] == {num_splits.IN_GRAPH: 1}
    assert report.verdict == "nothing-observed"


def test_prefill_on_another_kernel_is_not_judged() -> None:
    facts = {"server_args": {"dsa_prefill_backend": "flashmla_sparse"}}
    server = Server(facts=facts)
    raw, padded = batch("EXTEND", 9, 2), batch("EXTEND", 12, 2)
    server.plan(9, raw)
    server.pad(raw, padded, forward=0)
    report = check(server.finish(), {"PT101"})
    assert report.skipped["PT101"] == {num_splits.OTHER_KERNEL: 1}


def test_the_shard_of_a_context_parallel_rank_is_q() -> None:
    # Zigzag context parallelism on a DSA model: planned 66 rows, this rank's shard has 36.
    server = Server(attn_cp=2)
    raw = batch("EXTEND", 66, 2)
    server.pad(raw, {**raw, "attn_cp_metadata.rows": 36}, forward=0)
    server.plan(66, raw, forward=0)
    finding = only_finding(server.finish())
    assert (finding.left.value, finding.right.value, finding.right.expected) == (36, 67, 37)
    assert "this rank's 36" in finding.sentence


def test_the_inner_pad_is_not_taken_for_the_whole() -> None:
    server = Server()
    raw = batch("DECODE", 4, 4)
    server.plan(4, raw)
    outer = server.pad(raw, raw, forward=0)
    server.add(
        "pad", forward=0, parent=outer, function="_pad_inputs_to_size", entry=raw,
        exit=batch("DECODE", 99, 99),
    )  # fmt: skip
    report = check(server.finish(), {"PT101"})
    assert (report.verdict, report.evaluated["PT101"]) == ("clean", 1)


def test_pairs_tell_what_disagrees_first() -> None:
    pairs = row_pairs(report_30296())
    assert len(pairs) == 1
    pair, count = pairs[0]
    assert (pair.q_rows, pair.num_splits, pair.needs, pair.sign, count) == (8, 7, 9, "shorter", 1)


@pytest.mark.parametrize(
    ("named", "plan_rows"),
    [
        # Another backend object planned again after the pad; the kernel was given the older plan.
        (0, 1),
        (1, 2),
        # A number that leads to no plan is not the latest one.
        (99, None),
        (None, 2),
    ],
)
def test_a_call_works_with_the_plan_it_names(
    monkeypatch: pytest.MonkeyPatch, named: int | None, plan_rows: int | None
) -> None:
    columns = schema.event_columns

    def with_plan_seq(kind: str) -> tuple[schema.Column, ...]:
        named = schema.Column("plan_seq", schema.ColumnType.INT, "enter_seq", "the plan")
        own = [column for column in columns(kind) if column.name != "plan_seq"]
        return (*own, named) if kind == "launch" else tuple(own)

    server = Server(attn_tp=2)
    raw, padded = batch("DECODE", 1, 1), batch("DECODE", 2, 2)
    server.add("forward", worker="draft", forward=0, forward_mode="DECODE", exit_seq=99)
    own: dict[str, int | str] = {"worker": "draft"}
    plans = [server.plan(1, raw, backend_id=0, page_table_1__rows=1, **own)]
    server.pad(raw, padded, forward=0, **own)
    plans.append(server.plan(2, padded, backend_id=1, page_table_1__rows=2, forward=0, **own))
    server.add(
        "launch", worker="draft", forward=0, function="flash_mla_with_kvcache",
        q__shape=[2, 1, 64, 576], num_splits__rows=2, failed=1,
    )  # fmt: skip
    recording = server.finish()
    number = NOT_OBSERVED_CODE if named is None else plans[named] if named < 2 else 77
    monkeypatch.setattr(schema, "event_columns", with_plan_seq)
    recording.table("launch")._cache["plan_seq"] = np.array([number], dtype=np.int64)
    (finding,) = check(recording, {"PT101"}).findings
    evidence = Evidence(recording)
    assert wording.planned_rows(evidence, finding) == plan_rows
    # The tables are judged by that plan too: the older one covers one row of two.
    tables = check(recording, {"PT102"})
    shown = [g.first.right.value for g in (*tables.groups, *tables.tolerated)]
    assert shown == ([1] if named == 0 else [])
    # It says when that very plan was made.
    told = {1: "before the pad", 2: "after the pad", None: "was not recorded"}[plan_rows]
    assert told in finding.sentence
