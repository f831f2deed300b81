"""Changed copies of a release: the verdict follows the code, and no clean is unearned.

Each change is made in a copy of the release's source (by links), which a worker of its own imports.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from padtrace.contracts.engine import check
from padtrace.errors import EnvironmentMissingError
from padtrace.explore.make import make
from padtrace.recording.model import Recording
from padtrace.recording.reader import read
from padtrace.replay import releases, service
from tests.replay.test_driver_tables import DRAFT_EXTEND, VERIFY_CP, outcome

pytestmark = [pytest.mark.release, pytest.mark.slow]

VERSION = "0.5.18"
RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
BATCH = "srt/model_executor/forward_batch_info.py"
UTILS = "srt/layers/attention/dsa/utils.py"
EAGER = "srt/model_executor/runner/eager_runner.py"
VERIFY = {
    "forward_mode": "TARGET_VERIFY", "spec": "verify", "width": 6, "bs": [1], "attn_tp": 2,
}  # fmt: skip

PAD_MORE = (
    BATCH,
    "        self._pad_inputs_to_size(model_runner, num_tokens, bs)\n",
    "        self._pad_inputs_to_size(model_runner, num_tokens + 1, bs)\n",
)
PLAN_MORE = (UTILS, "    return tokens\n\n\ndef pad_dsa", "    return tokens + 1\n\n\ndef pad_dsa")
# PR #30642: the plan is aligned as the pad will be.
PLAN_ALIGNED = (
    UTILS,
    "    # Reuse the mode selected when the DP buffer was prepared.\n",
    "    for i in range(sync_group_size):\n"
    "        size = get_parallel().attn_tp_size\n"
    "        global_num_tokens[i] = ceil_align(global_num_tokens[i], size)\n",
)
# PR #34443 taken back: the plan is aligned to CP where q is not.
PLAN_ALIGNED_TO_CP = (UTILS, "    if not enable_cp_v2():\n", "    if True:\n")
# inputs/replan-after-pad: eager forwards plan again where the pad changed the sizes.
REPLAN_DECODE = (
    EAGER,
    "            forward_batch = self.load_batch(forward_batch, pp_proxy_tensors)\n"
    "        if forward_batch.needs_forward_metadata_init():\n",
    "            forward_batch = self.load_batch(forward_batch, pp_proxy_tensors)\n"
    "        if (\n"
    "            forward_batch.needs_forward_metadata_init()\n"
    "            or forward_batch.batch_size != forward_batch.forward_metadata_planned_bs\n"
    "        ):\n",
)
REPLAN_EXTEND = (
    EAGER,
    "            forward_batch.needs_forward_metadata_init()\n            or cp_v2_active\n",
    "            forward_batch.needs_forward_metadata_init()\n"
    "            or forward_batch.batch_size != forward_batch.forward_metadata_planned_bs\n"
    "            or forward_batch.input_ids.shape[0]\n"
    "            != forward_batch.forward_metadata_planned_num_tokens\n"
    "            or cp_v2_active\n",
)
FORGET_POSITIONS = (
    BATCH,
    "        self.positions = self._pad_tensor_to_size(self.positions, num_tokens)\n",
    "",
)


@pytest.fixture(autouse=True)
def _workers() -> Any:
    yield
    service.close()


def copy_with(target: Path, *changes: tuple[str, str, str]) -> Path:
    """A copy of the release in which each text stands in the place of another."""
    root = releases.here(VERSION)
    if root is None:
        pytest.skip(f"SGLang {VERSION} is not here: padtrace releases fetch {VERSION}")
    shutil.copytree(root / "sglang", target / "sglang", copy_function=os.symlink)
    for file, old, new in changes:
        changed = target / "sglang" / file
        text = changed.read_text()
        assert text.count(old) >= 1, f"{file} has no {old!r}"
        changed.unlink()
        changed.write_text(text.replace(old, new, 1))
    return target


def replayed_on(root: Path, case: Any) -> Recording:
    recording = case if isinstance(case, Recording) else make(case)
    return service.replay(recording, sglang=root, kernels="reference")


@pytest.mark.parametrize(
    ("change", "case", "rows"),
    [
        (PAD_MORE, VERIFY, (7, 7, "dies")),
        (PLAN_MORE, VERIFY, (6, 8, "dies")),
        (PLAN_ALIGNED, DRAFT_EXTEND, (8, 9, "passes")),
        (PLAN_ALIGNED_TO_CP, VERIFY_CP, (6, 9, "dies")),
        (REPLAN_EXTEND, DRAFT_EXTEND, (8, 9, "passes")),
    ],
)
def test_the_verdict_follows_the_code(
    tmp_path: Path, change: tuple[str, str, str], case: Any, rows: tuple[Any, Any, str]
) -> None:
    replayed = replayed_on(copy_with(tmp_path, change), case)
    assert replayed.coverage["driven"]["not_driven"] == {}
    assert outcome(replayed) == rows
    assert check(replayed, {"PT101"}).verdict == ("clean" if rows[2] == "passes" else "divergent")


def test_a_plan_after_the_pad_of_another_object_is_not_what_the_kernel_reads(
    tmp_path: Path,
) -> None:
    """As the live patched server did: the steps plan 2, another object 3, the launch takes 2."""
    recording = read(RECORDINGS / "crash.safetensors")
    replayed = replayed_on(copy_with(tmp_path, REPLAN_DECODE, REPLAN_EXTEND), recording)
    findings = [
        one
        for one in check(replayed, {"PT101"}).findings
        if "DECODE (draft worker)" in one.sentence
    ]
    assert len(findings) == recording.rows("process")
    finding = findings[0]
    assert (finding.left.value, finding.right.value, finding.right.expected) == (2, 2, 3)
    assert finding.planned == "before the pad"
    plans = [
        event["num_splits.rows"]
        for event in replayed.events()
        if event.kind == "plan" and event["batch"] == finding.batch and event["process"] == 0
    ]
    assert 3 in plans


def test_a_field_forgotten_in_the_pad_is_no_clean(tmp_path: Path) -> None:
    replayed = replayed_on(copy_with(tmp_path, FORGET_POSITIONS), {**VERIFY, "attn_tp": 4})
    errors = [event for event in replayed.events() if event.kind == "error"]
    assert errors or check(replayed).verdict == "divergent"


@pytest.mark.parametrize(
    "change",
    [
        (BATCH, "    def prepare_mlp_sync_batch(", "    def prepare_another_way("),
        (UTILS, "def pad_dsa_cache_seqlens(", "def pad_dsa_cache_seqlens(:"),
    ],
)
def test_code_that_is_not_there_gives_no_verdict(
    tmp_path: Path, change: tuple[str, str, str]
) -> None:
    root = copy_with(tmp_path, change)
    for _ in range(2):  # a second try must not find the release ready
        with pytest.raises(EnvironmentMissingError) as caught:
            replayed_on(root, VERIFY)
        assert caught.value.exit_code == 4
