"""Every probe fails in a live server; the server does not notice, the recording says which."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from padtrace.recording.model import Recording
from tests.live import by_hand

pytestmark = pytest.mark.live
HERE = Path(__file__).resolve().parent
LOST = re.compile(r"padtrace: the probe of (\S+) failed and is off: ValueError: injected")
# What a CPU server of the lab calls in every run.
CALLED = {
    "forward", "init_new", "init_mlp_sync_metadata", "mark_forward_metadata_ready",
    "prepare_mlp_sync_batch", "_pad_inputs_to_size", "post_forward_mlp_sync_batch",
    "prepare_mlp_sync_batch_raw", "run_batch", "init_attention_backend", "create_decode_backend",
    "create_draft_extend_backend", "dsa.init_forward_metadata", "dsa._compute_flashmla_metadata",
    "dsa_multi_step.init_forward_metadata", "flash_mla_with_kvcache", "get_mla_metadata",
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Recording]:
    folder = tmp_path_factory.mktemp("faults")
    rings = folder / "rings"
    path = os.pathsep.join([str(HERE / "faults"), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "PADTRACE_TEST_FAULTS": str(folder / "first")}
    with by_hand.serving(folder, rings, by_hand.DSA, **variables) as server:
        # The fixture fails unless every one is answered in full.
        by_hand.answered(server, (3, 17, 70, 1, 9))
        log = by_hand.log_of(server)
    recording, _ = by_hand.seal(folder, rings)
    return log, recording


def hooks(recording: Recording) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = recording.coverage["hooks"]
    return found


def test_each_probe_that_was_asked_is_lost_and_named(faulty: tuple[str, Recording]) -> None:
    _, recording = faulty
    fired = {name for name, hook in hooks(recording).items() if any(hook["fired"].values())}
    assert fired >= CALLED
    lost = {name for name, hook in hooks(recording).items() if hook["status"] == "lost"}
    assert lost >= CALLED
    assert {hooks(recording)[name]["note"] for name in CALLED} == {"ValueError in the probe"}


def test_before_the_call_in_one_rank_and_after_it_in_the_other(
    faulty: tuple[str, Recording],
) -> None:
    _, recording = faulty
    both = [name for name in CALLED if hooks(recording)[name]["lost_in"] == [0, 1]]
    assert sorted(both) == sorted(CALLED)


def test_the_log_has_one_line_for_each_loss(faulty: tuple[str, Recording]) -> None:
    log, recording = faulty
    said = LOST.findall(log)
    assert set(said) >= CALLED
    for name in set(said):
        assert said.count(name) == len(hooks(recording)[name]["lost_in"]), name
    assert "Traceback" not in log


def test_what_was_recorded_before_is_still_there(faulty: tuple[str, Recording]) -> None:
    _, recording = faulty
    assert recording.rows("process") == 2
    assert sum(recording.rows(kind) for kind in ("forward", "batch", "plan", "pad")) > 0
