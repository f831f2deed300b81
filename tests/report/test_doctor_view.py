"""What `padtrace doctor` prints of an SGLang, for people and as JSON."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from padtrace.record.targets import DoctorRow
from padtrace.report.doctor_view import print_doctor

HOOKS = [
    DoctorRow("forward", "found", "sglang.srt.model_executor.ModelRunner.forward", "lost", False),
    DoctorRow("dsa.slice", "moved", "sglang.srt.nsa_backend.NSAFlashMLAMetadata.slice", "", False),
    DoctorRow("flash_mla", "absent", "", "rows that reached the kernel", True),
]


def printed(
    hooks: list[DoctorRow], *, why_not: str = "", pad: str | None = "x", **more: Any
) -> Any:
    found = SimpleNamespace(version="0.5.18", root="somewhere", capabilities={"pad": pad})
    out = Console(file=io.StringIO(), width=100)
    code = print_doctor(out, found, hooks, why_not, json=more.get("json", False))
    return code, out.file.getvalue()  # type: ignore[attr-defined]


def test_hooks_are_told_with_where_they_are_or_what_their_absence_costs() -> None:
    code, text = printed(HOOKS)
    assert code == 0
    assert "record: 2 of 3 functions are in SGLang 0.5.18" in text
    assert "model_executor.ModelRunner.forward" in text
    assert "lost" not in text  # a cost is for those that are absent
    assert "rows that reached the kernel" in text
    assert "kernel packages are looked for in this interpreter" in text
    assert "the recorder of this interpreter is compiled" in text
    assert "replay: SGLang 0.5.18 has every function that padtrace needs" in text


def test_a_plain_recorder_says_why() -> None:
    _, text = printed(HOOKS[:2], why_not="PADTRACE_NATIVE is 0")
    assert "the recorder of this interpreter is plain Python, since PADTRACE_NATIVE is 0" in text
    assert "kernel packages" not in text


def test_a_missing_capability_of_the_replay_is_exit_code_4() -> None:
    code, text = printed(HOOKS, pad=None)
    assert code == 4
    assert "replay: SGLang 0.5.18 lacks pad" in text


def test_json_has_every_row() -> None:
    code, text = printed(HOOKS, why_not="no compiler", pad=None, json=True)
    told = json.loads(text)
    assert code == 4
    assert [row["hook"] for row in told["hooks"]] == ["forward", "dsa.slice", "flash_mla"]
    assert told["recorder"] == {"compiled": False, "why_not": "no compiler"}
    assert told["missing"] == ["pad"]
