"""The plugin in a real SGLang release, in a process of its own.

By default the release that `make test` fetches; PADTRACE_TEST_SGLANG_ROOT names another folder that
holds `sglang/`, PADTRACE_TEST_PYTHON an interpreter with torch and what SGLang imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from padtrace.record.seal import seal
from padtrace.replay import releases

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parent.parent.parent
_VERSION = "0.5.18"
_RELEASE = os.environ.get("PADTRACE_TEST_SGLANG_ROOT") or str(releases.here(_VERSION) or "")
_PYTHON = os.environ.get("PADTRACE_TEST_PYTHON", sys.executable)

if not _RELEASE:
    pytest.skip(
        f"SGLang {_VERSION} is not here: padtrace releases fetch {_VERSION}",
        allow_module_level=True,
    )


def run(folder: Path | None) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PADTRACE_")}
    environment["PYTHONPATH"] = os.pathsep.join([_RELEASE, str(ROOT)])
    if folder is not None:
        environment["PADTRACE_RECORD"] = str(folder)
        environment["PADTRACE_RING"] = "1M"
    result = subprocess.run(
        [_PYTHON, str(Path(__file__).with_name("release_script.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "No module named 'torch'" in result.stderr:
        pytest.skip(f"{_PYTHON} has no torch")
    assert result.returncode == 0, result.stderr[-2000:]
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def test_installed_but_off_leaves_the_very_same_objects() -> None:
    answer = run(None)
    assert answer["off_is_identical"] is True
    assert answer["hooked"] == []


def test_on_it_records_a_real_pad(tmp_path: Path) -> None:
    answer = run(tmp_path / "rings")
    # Asked for, but called from somewhere that is no scheduler: still the same objects.
    assert answer["off_is_identical"] is True
    assert len(answer["hooked"]) == 4
    assert answer["pad"] == {"input_ids": 4, "seq_lens_sum": 16}  # 3 x 5, and one row of 1
    recording = seal([tmp_path / "rings"]).recording
    (event,) = [e for e in recording.events() if e.kind == "pad"]
    entry, after = event.snapshot("entry"), event.snapshot("exit")
    assert (event["function"], event["num_tokens"], event["bs"]) == ("_pad_inputs_to_size", 4, 4)
    for column in ("input_ids.rows", "positions.rows", "out_cache_loc.rows", "seq_lens.rows"):
        assert (entry[column], after[column]) == (3, 4), column
    assert (entry["seq_lens_cpu.max"], entry["seq_lens_cpu.sum"]) == (5, 15)
    assert (after["seq_lens_cpu.max"], after["seq_lens_cpu.sum"]) == (5, 16)
    assert (entry["seq_lens_sum"], after["seq_lens_sum"]) == (15, 16)
    assert event["owner.lora_ids.rows"] == 4
    fingerprints = recording.facts[0]["fingerprints"]
    assert any(name.endswith("ForwardBatch._pad_inputs_to_size") for name in fingerprints)


def test_every_target_of_the_table_is_somewhere_in_this_release() -> None:
    found = run(None)["found"]
    # What the table itself says some release does not have, and what only a GPU has.
    may_be_absent = {
        "init_mlp_sync_metadata",
        "mark_forward_metadata_ready",
        "decode_graph._max_dp_batch_size",
        "_pad_to_bucket",
        "dsa.init_forward_metadata_capture_cuda_graph",
        "dsa_multi_step.init_forward_metadata_capture_cuda_graph",
        "flash_mla_with_kvcache",
        "get_mla_metadata",
        "fp8_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
    }
    absent = {hook for hook, status in found.items() if status == "absent"}
    assert absent <= may_be_absent
