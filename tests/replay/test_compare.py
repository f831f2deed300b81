"""Driven events held against recorded ones, and what of them is nobody's difference."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

pytest.importorskip("torch")

from padtrace.recording import schema
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.model import Value
from padtrace.replay.worker.compare import Comparer, Comparison
from padtrace.replay.worker.events import RecordedEvent
from padtrace.replay.worker.tap import DrivenEvent

Events = list[tuple[str, dict[str, Value]]]

FORWARD: tuple[str, dict[str, Value]] = ("forward", {"failed": 1})
PLAN: tuple[str, dict[str, Value]] = ("plan", {"function": "init_forward_metadata"})
GATHER = "torch/distributed/distributed_c10d.py:4394 all_gather_single"
KERNEL = "sglang/srt/layers/attention/dsa_backend.py:3351 _forward_flashmla_kv"


def error(frame: str) -> tuple[str, dict[str, Value]]:
    return ("error", {"type": "RuntimeError", "frames": [frame]})


def compared(recorded: Events, driven: Events) -> Comparison:
    builder = RecordingBuilder({})
    builder.add_process({}, {})
    for number, (kind, values) in enumerate(recorded):
        builder.add_event(kind, {"process": 0, "enter_seq": number, **values})
    recording = builder.finish()
    seen: dict[str, int] = {}
    events = []
    for kind, _ in recorded:
        row = seen[kind] = seen.get(kind, -1) + 1
        table = recording.table(kind)
        raw = [int(table.column(column.name)[row]) for column in schema.event_columns(kind)]
        events.append(RecordedEvent(kind, raw, recording))
    return Comparer().compare(events, [_driven(n, *one) for n, one in enumerate(driven)])


def _driven(number: int, kind: str, values: Mapping[str, Value]) -> DrivenEvent:
    return DrivenEvent(kind, {"enter_seq": number}, dict(values))


def test_equal_events_have_no_difference() -> None:
    result = compared([FORWARD, PLAN], [FORWARD, PLAN])
    assert (result.events, result.differences) == (2, [])
    assert result.values > 0


@pytest.mark.parametrize("driven", [[], [PLAN]])
def test_a_collective_that_failed_with_another_rank_is_no_difference(driven: Events) -> None:
    """One rank is driven alone, so its forward goes on where the recorded one could not."""
    rest: Events = [("forward", {"failed": 0}), *driven, ("unpad", {})]
    result = compared([FORWARD, *driven, error(GATHER)], rest)
    assert result.differences == []
    assert sum(result.not_compared.values()) == 2  # the error, and that the forward failed


def test_what_came_before_the_collective_is_compared() -> None:
    other: tuple[str, dict[str, Value]] = ("pad", {})
    result = compared([FORWARD, PLAN, error(GATHER)], [FORWARD, other, ("unpad", {})])
    assert [one.column for one in result.differences] == ["order"]


def test_an_error_of_anything_else_must_be_met() -> None:
    result = compared([FORWARD, error(KERNEL)], [FORWARD, ("unpad", {})])
    assert [one.column for one in result.differences] == ["order"]
