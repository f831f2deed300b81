"""Which device a replay shows SGLang, and what it says of an assumption."""

from __future__ import annotations

from typing import Any

import pytest

from padtrace.errors import UsageError
from padtrace.replay.devices import ASSUMED, shown_device
from padtrace.replay.worker.device import prepare_environment


@pytest.mark.parametrize(
    ("facts", "asked", "device"),
    [
        ([{"device": {"type": "cpu"}}], None, "cpu"),
        ([{"device": {"type": "cuda", "capability": [9, 0]}}], None, "sm90"),
        ([{"device": {"type": "cuda", "capability": [10, 0]}}], None, "sm100"),
        ([{"device": {"type": "cuda", "capability": [9, 0]}}], "cpu", "cpu"),
        ([{"case": {"plan": "auto"}}], None, "cpu"),
        ([{"case": {"device": "sm90"}}], None, "sm90"),
        ([{}, {"device": {"type": "cpu"}}], None, "cpu"),
    ],
)
def test_what_is_recorded_is_shown_and_nothing_is_assumed(
    facts: list[dict[str, Any]], asked: str | None, device: str
) -> None:
    assert shown_device(facts, asked) == (device, "")


@pytest.mark.parametrize(
    "facts",
    [
        [],
        [{}],
        [{"device": {"type": None}}],
        [{"device": {"type": "cuda", "capability": [8, 0]}}],
        [{"device": {"type": "xpu"}}],
    ],
)
def test_a_recording_without_the_fact_says_what_is_assumed(facts: list[dict[str, Any]]) -> None:
    device, assumed = shown_device(facts, None)
    assert device == ASSUMED
    assert ASSUMED in assumed


@pytest.mark.parametrize("device", ["sm70", "", "hip"])
def test_a_device_that_cannot_be_shown_is_refused(device: str) -> None:
    with pytest.raises(UsageError) as caught:
        prepare_environment(device)
    assert caught.value.exit_code == 2
    assert caught.value.hint
