"""Known faults of the hot path, each as a strict expected failure until it is written once.

What is right here, whatever the engine: a healthy server has no finding, no probe is lost by what
the server does, and what was left out is said (`coverage.blind.other_threads`, calls by process).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from padtrace.record import native
from tests.record.hot_path_script import FUNCTIONS, WAYS

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {"compiled": "1", "plain": "0"}
# Ill-formed calls that do not end the probe: the hook takes more names than the function does.
SOUND = {
    *(f"{name}, one name more" for name in ("plan", "pad", "ready", "unpad")),
    *(f"kernel, {way}" for way in ("nothing", "another name")),
}
THREADS = pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="calls of all threads share one stack of open events"
)
ILL_FORMED = pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a call that the function itself refuses ends the probe",
)
engines = pytest.mark.parametrize("engine", ENGINES)


@cache
def found(engine: str, scenario: str, folder: Path) -> dict[str, Any]:
    if engine == "compiled" and native.compiled is None:
        pytest.skip("the extension was not built: no C compiler, or PADTRACE_NATIVE")
    done = subprocess.run(
        [sys.executable, "-m", "tests.record.hot_path_script", scenario, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PADTRACE_NATIVE": ENGINES[engine]},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        # Not the failure that is expected below.
        raise RuntimeError(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer["compiled"] == (engine == "compiled")
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rings")


def sound(answer: dict[str, Any]) -> None:
    """Every forward is recorded or counted as left out, and nothing is made up."""
    assert (answer["verdict"], answer["findings"], answer["lost"]) == ("clean", 0, [])
    assert answer["errors"] == []
    assert answer["strays"] == 0
    rows, made = answer["rows"], answer["made"]
    assert rows["forward"] == made or answer["left_out"] > 0
    assert 0 < rows["forward"] <= made
    # One plan, one pad and one run of equal launches in each.
    assert rows["plan"] == rows["pad"] == rows["launch"] == rows["forward"]


@engines
def test_one_thread_is_recorded(engine: str, folder: Path) -> None:
    """What the failures below are measured against."""
    sound(found(engine, "1", folder / engine / "1"))


@engines
@pytest.mark.parametrize("count", [2, 8])
@THREADS
def test_hooked_functions_called_from_several_threads(
    engine: str, count: int, folder: Path
) -> None:
    sound(found(engine, str(count), folder / engine / str(count)))


@engines
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, marks=() if call in SOUND else ILL_FORMED)
        for call in (f"{name}, {way}" for name in FUNCTIONS for way in WAYS)
    ],
)
def test_a_call_the_server_got_wrong_ends_no_probe(engine: str, call: str, folder: Path) -> None:
    answer = found(engine, "ill-formed", folder / engine / "ill-formed")[call]
    # The function itself refuses it, and that is what the server sees.
    assert answer["refused"].startswith("Server._")
    assert (answer["verdict"], answer["lost"]) == ("clean", [])
    assert min(answer["rows"].values()) >= 1
