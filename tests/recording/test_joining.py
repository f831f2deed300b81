"""Recordings joined: every event, fact and text as in its part."""

from __future__ import annotations

from pathlib import Path

import pytest

from padtrace.recording.joining import join
from padtrace.recording.model import Recording
from padtrace.recording.reader import from_bytes, read
from padtrace.recording.writer import to_bytes
from tests.test_recordings import FILES, FOLDER

CRASH = FOLDER / "crash.safetensors"


def told(recording: Recording, first: int = 0) -> list[tuple[str, dict[str, object]]]:
    """All events with their values decoded, processes counted from `first`."""
    found = []
    for event in recording.events():
        process = event["process"]
        assert isinstance(process, int)
        found.append((event.kind, {**event.values, "process": process + first}))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_one_part_is_itself(path: Path) -> None:
    part = read(path)
    joined = join([part])
    assert told(joined) == told(part)
    assert (joined.facts, joined.about) == (part.facts, part.about)
    assert joined.coverage == part.coverage


def test_two_parts_follow_each_other_and_can_be_written() -> None:
    first, second = read(CRASH), read(FILES[1])
    joined = from_bytes(to_bytes(join([first, second])), "the joined recording")
    processes = first.rows("process")
    assert joined.rows("process") == processes + second.rows("process")
    assert joined.facts == first.facts + second.facts
    assert [joined.process(i) for i in range(processes)] == [
        first.process(i) for i in range(processes)
    ]

    def in_order(events: list[tuple[str, dict[str, object]]]) -> list[str]:
        return sorted(repr(event) for event in events)

    assert in_order(told(joined)) == in_order(told(first) + told(second, processes))


def test_what_repeats_is_stored_once() -> None:
    part = read(CRASH)
    joined = join([part, part])
    assert joined.rows("forward") == 2 * part.rows("forward")
    for table in ("snapshot", "vector"):
        assert joined.rows(table) == join([part]).rows(table)
    assert joined.strings == join([part]).strings
