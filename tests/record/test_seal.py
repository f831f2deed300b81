"""Sealing: the numbers arrive unchanged, runs are not mixed, what is missing is named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from padtrace.errors import BadRecordingError, NothingObservedError, UsageError
from padtrace.record import ring_file, wire
from padtrace.record.ring import EventWriter
from padtrace.record.seal import seal
from padtrace.recording import reader, schema
from padtrace.recording.absent import NO_ATTRIBUTE_CODE, NONE_CODE, Absent
from padtrace.recording.writer import to_bytes
from tests.record.made_events import EVENTS_PER_FORWARD, MadeRank, rank_facts

SECOND = 1_000_000_000


def rank(
    folder: Path, tp_rank: int, *, tp_size: int = 4, run: str = "one", forwards: int = 3
) -> EventWriter:
    """A rank of a server with two DP groups that wrote `forwards` forwards and closed."""
    writer = EventWriter.create(folder, size_bytes=1 << 20, run=run)
    writer.facts(rank_facts(tp_rank=tp_rank, tp_size=tp_size))
    made = MadeRank(writer, dp_rank=tp_rank // (tp_size // 2), attn_tp=tp_size // 2)
    for _ in made.forwards(forwards):
        pass
    writer.close()
    return writer


def shift_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The wall clock as it would be had somebody set it; the monotonic clock runs on."""
    real = time.time_ns
    monkeypatch.setattr(ring_file.time, "time_ns", lambda: real() + int(seconds * SECOND))


def test_every_kind_of_value_arrives(tmp_path: Path) -> None:
    writer = EventWriter.create(tmp_path, size_bytes=1 << 20)
    made = MadeRank(writer)
    snapshot = dict.fromkeys(wire.SNAPSHOT_NAMES, NONE_CODE)
    snapshot |= {"forward_mode": "DRAFT_EXTEND_V2", "batch_size": 3, "input_ids.rows": 18}
    snapshot |= {"extend_seq_lens_cpu": [6, 6, 6], "mamba_track_mask.rows": NO_ATTRIBUTE_CODE}
    snapshot |= {"global_num_tokens_cpu": [18, 0]}
    head = {"worker": "draft", "enter_seq": 1, "parent": NONE_CODE, "t_ns": 5}
    numbers = made.numbers("pad", {**head, "function": "f", "entry": snapshot, "num_tokens": 20})
    writer.write(wire.kind_index("pad"), *numbers)
    frames = {"enter_seq": 4, "t_ns": 6, "type": "RuntimeError", "frames": ["a.py:1 f", "b.py:2 g"]}
    writer.write(wire.kind_index("error"), *made.numbers("error", frames))
    recording = reader.from_bytes(to_bytes(seal([tmp_path]).recording), "sealed")
    pad, error = list(recording.events())
    assert (pad.text("worker"), pad["parent"], pad["num_tokens"]) == ("draft", None, 20)
    assert (pad["exit"], pad["exit_seq"]) == (Absent.NOT_OBSERVED, Absent.NOT_OBSERVED)
    entry = pad.snapshot("entry")
    assert entry is not None
    assert (entry["forward_mode"], entry["batch_size"]) == ("DRAFT_EXTEND_V2", 3)
    assert (entry["extend_seq_lens_cpu"], entry["global_num_tokens_cpu"]) == ([6, 6, 6], [18, 0])
    assert (entry["lora_ids.rows"], entry["mamba_track_mask.rows"]) == (None, Absent.NO_ATTRIBUTE)
    assert error["frames"] == ["a.py:1 f", "b.py:2 g"]


def test_ranks_are_in_order_and_complete(tmp_path: Path) -> None:
    for tp_rank in (3, 1, 0, 2):
        rank(tmp_path, tp_rank)
    sealed = seal([tmp_path])
    table = sealed.recording.table("process")
    assert table.column("tp_rank").tolist() == [0, 1, 2, 3]
    assert table.column("attn_dp_rank").tolist() == [0, 0, 1, 1]
    assert table.column("attn_tp_size").tolist() == [2, 2, 2, 2]
    assert (sealed.missing_ranks, sealed.notes) == ([], [])
    for kind in ("batch", "sync", "forward", "graph", "pad", "plan", "launch", "unpad"):
        assert sealed.recording.rows(kind) == 4 * 3
    assert sealed.recording.table("launch").column("count").tolist() == [61] * 12
    assert sealed.recording.about["sglang"] == "0.5.18"


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    rank(tmp_path, 0)
    rank(tmp_path, 2)
    sealed = seal([tmp_path])
    assert sealed.missing_ranks == [1, 3]
    assert sealed.recording.coverage["blind"]["missing_ranks"] == [1, 3]
    assert any("rank 1, 3" in note for note in sealed.notes)


def test_folders_of_two_nodes_are_merged(tmp_path: Path) -> None:
    for tp_rank in range(4):
        rank(tmp_path / f"node{tp_rank // 2}", tp_rank)
    sealed = seal([tmp_path / "node0", tmp_path / "node1"])
    assert sealed.recording.rows("process") == 4
    assert sealed.missing_ranks == []


def test_a_stale_ring_of_an_earlier_run_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        shift_clock(patch, -3600)
        stale = [rank(tmp_path, tp_rank, run="old") for tp_rank in range(4)]
    for tp_rank in range(3):
        rank(tmp_path, tp_rank, run="new")
    sealed = seal([tmp_path])
    assert sealed.recording.about["run"] == "new"
    assert sealed.missing_ranks == [3]
    assert {path for path, _ in sealed.left_out} == {writer.path for writer in stale}
    assert all("old" in reason for _, reason in sealed.left_out)
    old = seal([tmp_path], run="old")
    assert (old.missing_ranks, len(old.left_out)) == ([], 3)


def test_two_recorders_on_one_folder_stay_apart(tmp_path: Path) -> None:
    for tp_rank in range(2):
        rank(tmp_path, tp_rank, tp_size=2, run="a", forwards=2)
        rank(tmp_path, tp_rank, tp_size=2, run="b", forwards=5)
    one, other = seal([tmp_path], run="a"), seal([tmp_path], run="b")
    assert one.recording.rows("forward") == 2 * 2
    assert other.recording.rows("forward") == 2 * 5
    assert len(one.left_out) == len(other.left_out) == 2


def test_disjoint_ranks_of_two_runs_on_one_machine_stay_apart(tmp_path: Path) -> None:
    rank(tmp_path, 0, run="a")
    rank(tmp_path, 1, run="b")
    sealed = seal([tmp_path])
    assert sealed.recording.rows("process") == 1
    assert len(sealed.left_out) == 1


def test_runs_that_nodes_named_differently_are_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tp_rank in range(4):
        host = f"node{tp_rank // 2}"
        monkeypatch.setattr(ring_file.socket, "gethostname", lambda host=host: host)
        rank(tmp_path / host, tp_rank, run=f"run-of-{host}")
    sealed = seal([tmp_path / "node0", tmp_path / "node1"])
    assert sealed.recording.rows("process") == 4
    assert any("joined" in note for note in sealed.notes)


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    rank(tmp_path, 0, run="a")
    with pytest.raises(UsageError, match="no run b"):
        seal([tmp_path], run="b")


def test_damaged_rings_are_errors_of_their_own(tmp_path: Path) -> None:
    writers = [rank(tmp_path, tp_rank) for tp_rank in range(4)]
    writers[1].path.write_bytes(b"")
    whole = bytearray(writers[2].path.read_bytes())
    whole[40] ^= 4
    writers[2].path.write_bytes(whole)
    sealed = seal([tmp_path])
    assert sealed.recording.table("process").column("tp_rank").tolist() == [0, 3]
    assert len(sealed.damaged) == 2
    assert all(isinstance(error, BadRecordingError) for error in sealed.damaged)
    assert sealed.missing_ranks == [1, 2]


def test_only_damaged_rings_is_an_error(tmp_path: Path) -> None:
    rank(tmp_path, 0).path.write_bytes(b"no ring")
    with pytest.raises(BadRecordingError):
        seal([tmp_path])


def test_nothing_to_seal(tmp_path: Path) -> None:
    with pytest.raises(NothingObservedError):
        seal([tmp_path])
    with pytest.raises(UsageError):
        seal([tmp_path / "none"])


def test_a_clock_set_between_two_starts_does_not_part_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rank(tmp_path, 0, tp_size=2)
    with monkeypatch.context() as patch:
        shift_clock(patch, 500)
        second = rank(tmp_path, 1, tp_size=2)
    assert second.clock_offset_ns - first.clock_offset_ns > 400 * SECOND
    sealed = seal([tmp_path])
    times = sealed.recording.table("forward").column("t_ns")
    started = sealed.recording.table("process").column("started_ns")
    # Both made their forwards at the same monotonic times, give or take the jitter.
    assert abs(int(times[0]) - int(times[3])) < SECOND
    assert abs(int(started[0]) - int(started[1])) < 60 * SECOND
    assert any("clock" in note for note in sealed.notes)


def test_coverage_says_what_was_lost(tmp_path: Path) -> None:
    for tp_rank in range(2):
        writer = EventWriter.create(tmp_path, size_bytes=256 << 10, run="x")
        writer.facts(rank_facts(tp_rank=tp_rank, tp_size=2))
        pad = writer.hook("pad", "found", "ForwardBatch.prepare_mlp_sync_batch")
        writer.count(pad, 10 + tp_rank)
        if tp_rank:
            writer.lost(pad, writer.string("KeyError: 'x'"))
        for _ in MadeRank(writer, dp_rank=tp_rank, attn_tp=1).forwards(60):
            pass
        writer.close()
    recording = seal([tmp_path]).recording
    assert recording.coverage["hooks"]["pad"] == {
        "status": "lost",
        "target": "ForwardBatch.prepare_mlp_sync_batch",
        "fired": {"0": 10, "1": 11},
        "note": "KeyError: 'x'",
        "lost_in": [1],
    }
    process = recording.table("forward").column("process")
    for index in range(2):
        kept = sum(
            int((recording.table(kind).column("process") == index).sum())
            for kind in schema.EVENT_KINDS
        )
        dropped = recording.process(index)["dropped"]
        assert dropped == 60 * EVENTS_PER_FORWARD - kept > 0
        assert recording.coverage["blind"]["dropped"][str(index)] == dropped
        assert 0 < int((process == index).sum()) < 60


def test_a_lost_string_says_so(tmp_path: Path) -> None:
    writer = EventWriter.create(tmp_path, size_bytes=256 << 10)
    numbers = MadeRank(writer).numbers("ready", {"worker": "draft", "phase": "serve"})
    writer.write(wire.kind_index("ready"), *numbers)
    whole = bytearray(writer.path.read_bytes())
    whole[whole.index(b"draft")] ^= 1
    writer.path.write_bytes(whole)
    [event] = list(seal([tmp_path]).recording.events())
    assert (event["worker"], event["phase"]) == ("<string lost>", "serve")
    assert event["t_ns"] is Absent.NOT_OBSERVED
