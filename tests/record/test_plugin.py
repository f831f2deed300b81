"""The entry point: off it touches nothing, elsewhere than in a scheduler it touches nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

_PROBE = """
import sys
from padtrace.record import plugin
before = set(sys.modules)
def run_scheduler_process():
    plugin.register()
def run_detokenizer_process():
    plugin.register()
{call}
print(sorted(set(sys.modules) - before))
"""


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PADTRACE_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("call", "environment"),
    [
        ("run_scheduler_process()", {}),
        ("run_scheduler_process()", {"PADTRACE_RECORD": ""}),
        ("plugin.register()", {"PADTRACE_RECORD": "rings"}),
        ("run_detokenizer_process()", {"PADTRACE_RECORD": "rings"}),
    ],
)
def test_it_returns_at_once_and_imports_nothing(
    tmp_path: Path, call: str, environment: dict[str, str]
) -> None:
    environment = {
        name: str(tmp_path / value) if value else "" for name, value in environment.items()
    }
    result = _run(_PROBE.format(call=call), **environment)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_importing_it_costs_two_modules_of_the_standard_library() -> None:
    code = "import sys; b = set(sys.modules); import padtrace.record.plugin; print(sorted(set(sys.modules) - b))"  # noqa: E501
    result = _run(code)
    assert result.stdout == "['padtrace', 'padtrace.record', 'padtrace.record.plugin']\n"


def test_without_sglang_recording_stays_off_with_one_line(tmp_path: Path) -> None:
    code = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
sys.modules["torch"] = None
from padtrace.record import plugin
def run_scheduler_process():
    plugin.register()
    plugin.register()
run_scheduler_process()
print("goes on")
"""
    result = _run(code, PADTRACE_RECORD=str(tmp_path / "rings"))
    assert result.stdout == "goes on\n"
    lines = [line for line in result.stderr.splitlines() if "padtrace" in line]
    assert len(lines) == 1
    assert lines[0].startswith("padtrace: recording of this process is off:")


def test_without_room_for_a_ring_recording_stays_off_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    code = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
from padtrace.record import plugin
def run_scheduler_process():
    plugin.register()
run_scheduler_process()
"""
    result = _run(code, PADTRACE_RECORD=str(tmp_path / "file" / "rings"))
    assert result.returncode == 0
    assert len([line for line in result.stderr.splitlines() if "padtrace" in line]) == 1
