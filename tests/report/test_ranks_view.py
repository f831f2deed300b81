"""Ranks side by side: agreement, the idle rank, the missing rank, the step that is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from padtrace.contracts.engine import check
from padtrace.errors import NothingObservedError, UsageError
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.model import Recording
from padtrace.recording.reader import read
from padtrace.report import ranks_view
from tests.contracts.builders import Server, batch
from tests.report.snapshots import compare_with_snapshot, rendered

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def three_ranks() -> Recording:
    """Step 7: rank 0 verifies eagerly, rank 1 idles in a graph, rank 2 does nothing of its own."""
    server = Server(ranks=3, attn_tp=1, source="server")
    for rank, (mode, real, run, buffer) in enumerate(
        [("TARGET_VERIFY", 18, 0, 36), ("IDLE", 0, 1, 24)]
    ):
        place = {"step": 7, "forward": 3}
        server.add("sync", rank, step=7, counts_before=[3, rank, 0])
        server.add("forward", rank, forward_mode=mode, can_run_graph=run, **place)
        raw = batch(mode, real, real // 6, 6)
        padded = batch(mode, 18, 3, 6, dp_padding_mode="MAX_LEN", global_dp_buffer_len=buffer)
        server.pad(raw, padded, rank, **place)
        server.plan(18 if rank == 0 else 3, padded, rank, **place)
    server.add("forward", 2, step=6, forward=2, forward_mode="DECODE")
    return server.finish({"blind": {"missing_ranks": [3]}})


@pytest.mark.parametrize("width", [80, 160])
def test_ranks_that_disagree(width: int) -> None:
    text = rendered(
        lambda out: ranks_view.print_ranks(out, ranks_view.side_by_side(three_ranks(), 7)), width
    )
    assert max(len(line) for line in text.splitlines()) <= width
    if width == 80:
        compare_with_snapshot("ranks", text)


def test_what_the_ranks_did_is_one_object() -> None:
    shown = ranks_view.side_by_side(three_ranks(), 7).as_json()
    (forward,) = shown["forwards"]
    assert forward["disagree"] == ["counts", "run", "buffer"]
    idle = forward["ranks"][1]
    assert (idle["mode"], idle["real_rows"], idle["planned_rows"], idle["padded_rows"]) == (
        "IDLE", 0, 3, 18,
    )  # fmt: skip
    assert shown["ranks_without_forward"] == [2]
    assert shown["missing_ranks"] == [3]


def test_a_rank_that_the_topology_has_and_the_file_has_not_is_said() -> None:
    whole = Server(ranks=2, source="server")
    assert ranks_view.missing_ranks(whole.finish()) == []
    # The builder gives a rank of attention TP 4 a tp size of 4, and no other rank.
    alone = Server(ranks=1, attn_tp=4, source="server")
    assert ranks_view.missing_ranks(alone.finish()) == [1, 2, 3]


def test_a_step_without_forward_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as caught:
        ranks_view.side_by_side(three_ranks(), 99)
    assert "steps 6 to 7" in caught.value.why


def test_the_crash_is_shown_with_every_rank_alike() -> None:
    crash = read(RECORDINGS / "crash.safetensors")
    step = ranks_view.divergent_step(check(crash))
    shown = ranks_view.side_by_side(crash, step)
    assert [line.rank for line in shown.lines] == [0, 1, 2, 3]
    # The crash of sglang#30296: one row is planned, attention TP 2 pads it to two.
    assert {(x.planned_rows, x.padded_rows, x.mode) for x in shown.lines} == {(1, 2, "DECODE")}
    assert all(line.failed for line in shown.lines)


def test_an_idle_rank_of_a_healthy_server_is_shown() -> None:
    healthy = read(RECORDINGS / "healthy-dsa-eagle.safetensors")
    steps = healthy.table("forward").column("step")
    idle = [
        line
        for step in sorted({int(s) for s in steps if s >= 0})
        for line in ranks_view.side_by_side(healthy, step).lines
        if line.mode == "IDLE"
    ]
    assert idle
    assert {line.real_rows for line in idle} == {0}


def test_a_step_of_very_many_forwards_fits_a_screen() -> None:
    """A small file can say that thousands of forwards, or of ranks, were in one step."""
    server = Server(ranks=2, source="server")
    for number in range(3000):
        server.add("forward", step=7, forward=number, forward_mode="DECODE")
    result = ranks_view.side_by_side(server.finish())
    text = rendered(lambda out: ranks_view.print_ranks(out, result), 80)
    assert text.count("rank  mode") == ranks_view.MAX_FORWARDS
    assert f"{3000 - ranks_view.MAX_FORWARDS:,} more forwards in this step: see --json" in text
    assert len(result.as_json()["forwards"]) == 3000

    server = Server(ranks=1000, source="server")
    for rank in range(1000):
        server.add("forward", rank, step=7, forward=0, forward_mode="DECODE")
    result = ranks_view.side_by_side(server.finish())
    text = rendered(lambda out: ranks_view.print_ranks(out, result), 80)
    assert text.count("DECODE") == ranks_view.MAX_LINES
    assert f"{1000 - ranks_view.MAX_LINES:,} more ranks: see --json" in text


def test_a_step_without_any_forward_is_nothing_observed() -> None:
    with pytest.raises(NothingObservedError) as caught:
        ranks_view.side_by_side(Server(source="server").finish())
    assert caught.value.exit_code == 5


def test_a_rank_that_was_not_observed_is_no_number() -> None:
    builder = RecordingBuilder({"source": "server"})
    builder.add_process({"tp_size": 1}, {})
    builder.add_event("forward", {"process": 0, "enter_seq": 0, "step": 1, "forward": 0})
    result = ranks_view.side_by_side(builder.finish())
    assert [line.rank for line in result.lines] == [None]
    text = rendered(lambda out: ranks_view.print_ranks(out, result), 80)
    assert "9223372036854775" not in text
