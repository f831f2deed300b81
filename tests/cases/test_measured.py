"""Every measured case, on every release that is here, value by value."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from padtrace.recording.model import Recording
from padtrace.replay import releases, service
from tests.cases import oracle

MEASURED = oracle.load()
CASES: list[dict[str, Any]] = MEASURED["cases"]

pytestmark = pytest.mark.release


def _on(version: str) -> Any:
    if releases.here(version) is None:
        pytest.skip(f"SGLang {version} is not here: padtrace releases fetch {version}")

    def replay(recording: Recording) -> Recording:
        return service.replay(recording, sglang=version, kernels="off")

    return replay


@pytest.mark.parametrize("version", MEASURED["meta"]["releases"])
def test_every_measured_value_is_replayed(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    replay = _on(version)
    try:
        tally = oracle.compare(CASES, version, replay)
        assert not tally.wrong, "\n".join(oracle.listed(tally.wrong))
        assert tally.cases == {case["id"] for case in CASES}
        # Some 90 values a case; far fewer would mean that whole blocks were not looked at.
        assert tally.compared > 80 * len(CASES)
        _a_wrong_value_is_seen(version, replay)
    finally:
        service.close()
    with capsys.disabled():
        print(
            f" {tally.compared:,} values of {len(CASES)} cases compared on SGLang {version} ",
            end="",
        )


def _a_wrong_value_is_seen(version: str, replay: Any) -> None:
    """The comparison itself is held against a measurement that is off by one."""
    case = copy.deepcopy(next(case for case in CASES if case["id"] == "tp8-verify-b1w6"))
    case["expected"][version]["plan_after"]["num_splits"] += 1
    tally = oracle.compare([case], version, replay)
    assert len(tally.wrong) == 1
    assert "plan_after.num_splits" in tally.wrong[0]
