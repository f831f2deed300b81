"""Tier `full` on a live server: values fit the events, padded rows write nowhere."""

from __future__ import annotations

import pytest

from padtrace.contracts.engine import check
from padtrace.recording.model import Event, Recording
from padtrace.recording.value_tensors import ValueKey
from padtrace.sharing.check import share_check
from tests.live import by_hand

pytestmark = pytest.mark.live
PROMPTS = (3, 17, 70)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("values")
    variables = {"PADTRACE_TIER": "full", "PADTRACE_VALUES": "256M", "PADTRACE_RING": "16M"}
    with by_hand.serving(folder, folder / "rings", by_hand.DSA, **variables) as server:
        by_hand.answered(server, PROMPTS, new_tokens=4)
        assert by_hand.lines_of(server, "values are no longer kept") == []
    found, _ = by_hand.seal(folder, folder / "rings")
    return found


def events(recording: Recording, kind: str) -> list[Event]:
    return [event for event in recording.events() if event.kind == kind]


def values(recording: Recording, event: Event, field: str) -> list[int] | None:
    process, seq = event.integer("process"), event.integer("enter_seq")
    assert process is not None
    assert seq is not None
    kept = recording.values.get(ValueKey(process, seq, field))
    return None if kept is None else kept.data.reshape(-1).tolist()


def test_a_prompt_is_there_by_its_lengths_and_positions(recording: Recording) -> None:
    seen = set()
    for event in events(recording, "batch"):
        snapshot = event.snapshot("exit")
        if snapshot is None or snapshot["forward_mode"] != "EXTEND":
            continue
        lengths = values(recording, event, "exit.seq_lens")
        positions = values(recording, event, "exit.positions")
        if lengths and len(lengths) == 1 and event["worker"] == "target":
            seen.add(lengths[0])
            # Nothing of these prompts is cached but what an earlier one shares with them.
            assert positions is not None
            assert positions == list(range(lengths[0] - len(positions), lengths[0]))
    assert seen >= set(PROMPTS)


def test_the_values_have_the_rows_that_the_events_state(recording: Recording) -> None:
    compared = 0
    for event in events(recording, "pad"):
        for moment in ("entry", "exit"):
            snapshot = event.snapshot(moment)
            for field in ("seq_lens", "out_cache_loc", "positions"):
                kept = values(recording, event, f"{moment}.{field}")
                if kept is not None and snapshot is not None:
                    assert len(kept) == snapshot[f"{field}.rows"]
                    compared += 1
    for event in events(recording, "launch"):
        process, seq = event.integer("process"), event.integer("enter_seq")
        kept = recording.values.get(ValueKey(process or 0, seq or 0, "q"))
        if event["function"] == "flash_mla_with_kvcache" and kept is not None:
            assert list(kept.data.shape) == event["q.shape"]
            assert f"torch.{kept.dtype}" == event["q.dtype"]
            compared += 1
    assert compared > 100


def test_padded_rows_write_to_the_reserved_slot(recording: Recording) -> None:
    report = check(recording, {"PT1002"})
    assert report.findings == []
    assert report.evaluated["PT1002"] > 20
    padded = [
        event
        for event in events(recording, "pad")
        if (entry := event.snapshot("entry")) and (after := event.snapshot("exit"))
        if entry["input_ids.rows"] != after["input_ids.rows"]
        if values(recording, event, "exit.out_cache_loc") is not None
    ]
    assert padded, "with one prompt at a time the other rank is padded from nothing"


def test_nothing_was_lost_and_the_share_check_says_what_is_in_it(recording: Recording) -> None:
    counters = recording.coverage["blind"]["values"]
    assert set(counters) == {"0", "1"}
    assert all(c["failed"] == 0 and c["kept"] > 100 for c in counters.values())
    proof = share_check(recording)
    assert not proof.holds
    assert any("kv_rows" in line and "q (activations or KV)" in line for line in proof.lines)
    assert [problem for problem in proof.problems if "only tier" in problem] == []
