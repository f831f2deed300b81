"""Rows that real servers or SGLang's own code gave, each with its source, driven anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from padtrace.explore.make import make
from padtrace.recording.model import Recording
from padtrace.replay import releases, service

pytestmark = pytest.mark.release

INPUTS = Path(__file__).resolve().parent / "inputs"
RELEASES = ("0.5.12", "0.5.15", "0.5.16", "0.5.17", "0.5.18", "0.5.20", "0.5.23")
NO_KERNEL_ROWS = "no plan"


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    service.close()


def driven(case: Any, version: str, **options: Any) -> Recording:
    """The replay of one case, every forward of which must have been driven."""
    if releases.here(version) is None:
        pytest.skip(f"SGLang {version} is not here: padtrace releases fetch {version}")
    options.setdefault("kernels", "reference")
    replayed = service.replay(make(case), sglang=version, **options)
    assert replayed.coverage["driven"]["not_driven"] == {}
    assert replayed.coverage["driven"]["driven"] > 0
    return replayed


def outcome(recording: Recording) -> tuple[Any, Any, str]:
    """Rows of q and of num_splits of the last attention call, and whether the kernel took it."""
    calls = [
        event
        for event in recording.events()
        if event.kind == "launch" and event["function"] == "flash_mla_with_kvcache"
    ]
    if not calls:
        return None, None, NO_KERNEL_ROWS
    shape = calls[-1].vector("q.shape")
    assert shape is not None
    return shape[0], calls[-1]["num_splits.rows"], "dies" if calls[-1]["failed"] else "passes"


PREFILL = {"forward_mode": "EXTEND", "extend_lens": [3], "bs": [1], "attn_tp": 2}
CACHED = {**PREFILL, "prefix_lens": [3000], "device": "sm90"}
VERIFY_CP = {
    "forward_mode": "TARGET_VERIFY", "spec": "verify", "width": 6, "bs": [1], "attn_cp": 8,
    "cp_v2": True,
}  # fmt: skip
DRAFT_EXTEND = {
    "forward_mode": "DRAFT_EXTEND_V2", "spec": "draft_extend", "width": 6, "bs": [1], "attn_tp": 8,
}  # fmt: skip

# Where the values come from: a live server that died in its warm-up (the plain prefill on 0.5.23),
# PR #34443 before and after, sglang#30296, and SGLang's choice of MHA for short prompts on Hopper.
TABLE = [
    (PREFILL, "0.5.23", (3, 5, "dies")),
    (PREFILL, "0.5.18", (4, 5, "passes")),
    (VERIFY_CP, "0.5.16", (6, 9, "dies")),
    (VERIFY_CP, "0.5.17", (6, 9, "dies")),
    (VERIFY_CP, "0.5.18", (6, 7, "passes")),
    (VERIFY_CP, "0.5.20", (6, 7, "passes")),
    (VERIFY_CP, "0.5.23", (6, 7, "passes")),
    (DRAFT_EXTEND, "0.5.18", (8, 7, "dies")),
    ({**PREFILL, "device": "sm90"}, "0.5.18", (None, None, NO_KERNEL_ROWS)),
    ({**PREFILL, "device": "sm90"}, "0.5.23", (None, None, NO_KERNEL_ROWS)),
    (CACHED, "0.5.18", (4, 5, "passes")),
    (CACHED, "0.5.23", (3, 5, "dies")),
]


@pytest.mark.parametrize(
    ("case", "version", "rows"),
    sorted(TABLE, key=lambda row: (row[1], str(row[0].get("device")))),
)
def test_what_servers_did(case: Any, version: str, rows: tuple[Any, Any, str]) -> None:
    assert outcome(driven(case, version)) == rows


@pytest.mark.parametrize(
    ("name", "version", "rows"),
    [
        # SGLang's own `padded_extend_real_tokens` cuts q from 0.5.23 on.
        ("prefill-70-of-72-attn-tp4", "0.5.18", (72, 73, "passes")),
        ("prefill-70-of-72-attn-tp4", "0.5.23", (70, 73, "dies")),
        # The release's own split of the tokens over four ranks, made by its model.
        ("prefill-in-seq-split-cp4", "0.5.18", (16, 65, "dies")),
        # Rows of a draft are requests x top-k, of the plan and of the pad alike.
        ("draft-topk4", "0.5.18", (32, 33, "passes")),
        # Without DP and gathered buffers nothing is synchronised, so nothing is padded.
        ("plain-tp2", "0.5.18", (3, 4, "passes")),
    ],
)
def test_small_inputs_that_failed(name: str, version: str, rows: tuple[Any, Any, str]) -> None:
    case = json.loads((INPUTS / f"{name}.json").read_text())
    assert outcome(driven(case, version)) == rows


def test_nothing_is_padded_where_nothing_is_synchronised() -> None:
    case = json.loads((INPUTS / "plain-tp2.json").read_text())
    kinds = {event.kind for event in driven(case, "0.5.18").events()}
    assert {"pad", "unpad", "sync"}.isdisjoint(kinds)


@pytest.mark.parametrize("version", RELEASES)
def test_every_mode_is_driven_on_every_release(version: str) -> None:
    """Rows as sglang#30296 tells them, for the draft extend; the others must just be driven."""
    pair = {"bs": [3, 1], "attn_tp": 2, "attn_dp": 2}
    cases = [
        {"forward_mode": "EXTEND", "extend_lens": [3, 2], "bs": [2, 1], "attn_tp": 2},
        {"forward_mode": "DECODE", **pair},
        {"forward_mode": "IDLE", **pair, "bs": [0, 3]},
        {"forward_mode": "TARGET_VERIFY", "spec": "verify", "width": 6, **pair},
        {"forward_mode": "IDLE", "spec": "verify", "width": 6, **pair, "bs": [0, 3]},
        {"forward_mode": "DECODE", "spec": "draft", "steps": 2, **pair},
        {"forward_mode": "IDLE", "spec": "draft", **pair, "bs": [0, 3]},
        {"forward_mode": "EXTEND", "spec": "draft_extend", "extend_lens": [4], "bs": [1]},
        DRAFT_EXTEND,
    ]  # fmt: skip
    replayed = driven(cases, version)
    last = {event["batch"]: event for event in replayed.events() if event.kind == "launch"}
    assert last
    assert outcome(driven(DRAFT_EXTEND, version)) == (8, 7, "dies")
