"""Each benchmark runs in a tiny form and keeps its promise about its last line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from padtrace.replay import environments, releases
from tests.benchmarks.scripts import FOLDER

_RELEASE = "0.5.18"
pytestmark = [pytest.mark.release, pytest.mark.slow]


def _last_line(script: str, arguments: list[str], folder: Path) -> dict[str, float]:
    if releases.here(_RELEASE) is None:
        pytest.skip(f"SGLang {_RELEASE} is not here: padtrace releases fetch {_RELEASE}")
    if environments.missing_packages():
        pytest.skip(f"this interpreter cannot import SGLang: {environments.missing_packages()}")
    command = [sys.executable, str(FOLDER / script), "--sglang", _RELEASE, *arguments]
    done = subprocess.run(
        [*command, "--folder", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_recorder(tmp_path: Path) -> None:
    tiny = ["--rounds", "2", "--pool", "6", "--dumper-rounds", "1", "--size-forwards", "6"]
    result = _last_line("recorder.py", [*tiny, "--ranks", "2", "4"], tmp_path)
    for name in ("us_per_forward", "us_per_launch", "ratio_to_empty_hooks", "dumper_ratio"):
        assert result[name] > 0, name
    # A draft is a batch, sync, plan, metadata launch, ready, forward, graph, pad, launch, unpad;
    # what is planned in the forward has no ready.
    assert 9 <= result["events_per_forward"] <= 10
    for ranks in (2, 4):
        assert result[f"bytes_per_forward_{ranks}_ranks"] > 0
        assert result[f"ring_bytes_per_forward_{ranks}_ranks"] >= 10 * 512


def test_replay(tmp_path: Path) -> None:
    tiny = ["--forwards", "40", "--rounds", "1", "--starts", "1", "--steps", "12"]
    result = _last_line("replay.py", [*tiny, "--distinct", "4", "--ranks", "2"], tmp_path)
    for name in (
        "forwards_per_second",
        "check_seconds_10000x32",
        "first_line_seconds",
        "help_ratio",
        "info_ratio",
    ):
        assert result[name] > 0, name
