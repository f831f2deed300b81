"""Comparing recordings: pairing, what is compared, what is left out, where they part."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from padtrace.explore.differences import MAX_DIFFERENCES, compare
from padtrace.recording.absent import Absent
from padtrace.recording.model import Recording
from tests.contracts.builders import Server, batch


def one(rows: Any = 8, *, source: str = "server", before: int = 0, **more: Any) -> Recording:
    """One padded forward; `before` events of other batches come first and shift the numbers."""
    server = Server(source=source)
    for other in range(before):
        server.add("ready", batch=100 + other, planned_bs=1)
    server.plan(6, batch("DECODE", 6, 6))
    server.pad(batch("DECODE", 6, 6), batch("DECODE", rows, 8), **more)
    return server.finish()


def test_a_recording_is_like_itself() -> None:
    result = compare(one(), one())
    assert (result.total, result.differ) == (0, False)
    assert result.compared_events == 2
    assert result.compared_values > 20


def test_numbers_of_events_are_not_compared() -> None:
    result = compare(one(source="replay"), one(before=3))
    assert result.total == 0
    assert result.only_right == {"ready": 3}


def test_a_changed_row_is_named_with_its_place() -> None:
    result = compare(one(8), one(12))
    assert result.by_field == {"pad.exit.input_ids.rows": 1}
    difference = result.differences[0]
    assert (difference.left, difference.right) == (8, 12)
    assert (difference.rank, difference.step, difference.event) == (0, 1, "pad")
    assert difference.as_json()["field"] == "pad.exit.input_ids.rows"


def test_the_first_difference_in_time_comes_first() -> None:
    def steps(values: list[int]) -> Recording:
        server = Server()
        for step, rows in enumerate(values):
            raw = batch("DECODE", 3, 3)
            server.pad(raw, batch("DECODE", rows, 4), step=step, batch=step)
        return server.finish()

    result = compare(steps([4, 4, 4, 4]), steps([4, 5, 4, 6]))
    assert [difference.step for difference in result.differences] == [1, 3]


def test_not_observed_is_ignored_and_counted() -> None:
    plain = compare(one(), one())
    result = compare(one(Absent.NOT_OBSERVED), one(12))
    assert result.total == 0
    assert result.ignored["not observed"] == plain.ignored["not observed"] + 1


def test_no_attribute_is_ignored_apart_from_none() -> None:
    result = compare(one(Absent.NO_ATTRIBUTE), one(12))
    assert result.total == 0
    assert result.ignored["no such attribute in one of the releases"] == 1
    assert compare(one(None), one(12)).total == 1


def test_lists_and_strings_are_compared_by_content() -> None:
    def with_counts(counts: list[int], filler: str) -> Recording:
        server = Server()
        server.add("sync", function=filler)
        server.add("sync", batch=1, function="init_new", counts_after=counts)
        return server.finish()

    assert compare(with_counts([3, 5], "init_new"), with_counts([3, 5], "init_new")).total == 0
    result = compare(with_counts([3, 5], "init_new"), with_counts([4, 8], "init_new"))
    assert result.by_field == {"sync.counts_after": 1}
    assert (result.differences[0].left, result.differences[0].right) == ([3, 5], [4, 8])


def test_a_missing_event_parts_two_servers_but_not_a_replay() -> None:
    assert compare(one(), one(before=1)).differ
    assert not compare(one(source="replay"), one(before=1)).differ


def test_many_differences_are_bounded_and_counted() -> None:
    def steps(rows: int) -> Recording:
        server = Server()
        for step in range(MAX_DIFFERENCES + 50):
            server.pad(batch("DECODE", 3, 3), batch("DECODE", rows, 4), step=step, batch=step)
        return server.finish()

    result = compare(steps(4), steps(5))
    assert (len(result.differences), result.total) == (MAX_DIFFERENCES, MAX_DIFFERENCES + 50)


def test_outside_edits_are_carried_over() -> None:
    coverage = {"replay": {"outside_edits": 2, "outside_edit_list": [{"field": "seq_lens_sum"}]}}
    server = Server(source="replay")
    result = compare(one(), server.finish(coverage))
    assert result.outside_edits == 2
    (edit,) = result.totals()["outside_edit_list"]
    assert (edit["field"], edit["count"]) == ("seq_lens_sum", 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.data())
def test_exactly_the_changed_values_are_found(values: list[int], data: st.DataObject) -> None:
    changed = data.draw(st.lists(st.integers(0, 40), min_size=len(values), max_size=len(values)))

    def steps(rows: list[int]) -> Recording:
        server = Server()
        for step, count in enumerate(rows):
            server.pad(batch("DECODE", 1, 1), batch("DECODE", count, 1), step=step, batch=step)
        return server.finish()

    result = compare(steps(values), steps(changed))
    expected = [s for s, (a, b) in enumerate(zip(values, changed, strict=True)) if a != b]
    assert [difference.step for difference in result.differences] == expected
