"""Small inputs that padtrace once judged wrongly, through a real release, with the right verdict.

The right numbers are arithmetic on the releases' own rules, said with each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from padtrace.contracts.engine import check
from padtrace.contracts.model import Report
from padtrace.explore.make import make
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.model import Recording
from padtrace.replay import releases, service

pytestmark = pytest.mark.release

# DP 2, SUM_LEN beside a prefill: 8 requests of top-k 4 are 32 rows, in a buffer of 32 + 24.
TOPK = {
    "forward_mode": "DECODE", "spec": "draft", "width": 1, "attn_tp": 1, "attn_dp": 2,
    "dp_rank": 0, "bs": [8, 6], "raw_counts": [8, 6], "is_extend_in_batch": True, "topk": 4,
}  # fmt: skip
# A live server of plain TP 2 has q 3 and num_splits 4: nothing is synchronised, nothing padded.
PLAIN = {
    "forward_mode": "DRAFT_EXTEND_V2", "spec": "draft_extend", "width": 3, "bs": [1],
    "raw_counts": [1], "attn_tp": 2, "mlp_sync": False,
}  # fmt: skip
# MAX_LEN for a prefill graph: the 5 rows become the 12 of the other rank.
MAX_LEN = {
    "forward_mode": "EXTEND", "bs": [1, 1], "extend_lens": [5], "raw_counts": [5, 12],
    "attn_tp": 1, "attn_dp": 2, "dp_rank": 0, "is_extend_in_batch": True,
    "can_run_prefill_graph": True, "prefill_graph_bs": [16, 32],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    service.close()


def replayed(case: dict[str, Any], release: str = "0.5.18") -> Recording:
    if releases.here(release) is None:
        pytest.skip(f"SGLang {release} is not here: padtrace releases fetch {release}")
    return service.replay(make(case), sglang=release, kernels="off")


def rows(recording: Recording) -> tuple[int, int]:
    launches = [event for event in recording.events() if event.kind == "launch"]
    (launch,) = [event for event in launches if event.text("function") == "flash_mla_with_kvcache"]
    shape, splits = launch.vector("q.shape"), launch.integer("num_splits.rows")
    assert shape is not None
    assert splits is not None
    return shape[0], splits


def clean(recording: Recording) -> Report:
    report = check(recording)
    assert (report.verdict, report.findings) == ("clean", [])
    assert report.forwards.judged == 1
    return report


@pytest.mark.parametrize("release", ["0.5.18", "0.5.23"])
def test_branches_of_a_draft_are_planned_and_padded_alike(release: str) -> None:
    recording = replayed(TOPK, release)
    assert rows(recording) == (32, 33)
    clean(recording)


def test_plain_tensor_parallelism_pads_nothing() -> None:
    recording = replayed(PLAIN)
    assert rows(recording) == (3, 4)
    assert recording.rows("pad") == 0
    clean(recording)


def with_count(recording: Recording, count: Any) -> Recording:
    """The same with another count of real rows after the pad."""
    builder = RecordingBuilder(recording.about)
    for process in range(recording.rows("process")):
        builder.add_process(recording.process(process), recording.facts[process])
    for event in recording.events():
        values = dict(event.values)
        if event.kind == "pad":
            values["exit"] = {**values["exit"], "num_token_non_padded_cpu": count}
        builder.add_event(event.kind, values)
    return builder.finish(recording.coverage)


def test_padding_of_a_prefill_is_told_and_is_a_suspect_where_it_is_routed() -> None:
    recording = replayed(MAX_LEN)
    report = clean(recording)
    assert report.notes == [
        "7 of 12 rows of a padded prefill belong to nobody, and the routing mask covers them: "
        "num_token_non_padded_cpu is 5"
    ]
    for count in (None, 12):
        (finding,) = check(with_count(recording, count), {"PT1003"}).findings
        assert finding.severity.value == "suspect"
        assert finding.sentence.startswith("7 of 12 rows")
