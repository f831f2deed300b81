"""Older and newer releases than 0.5.18: the same hooks, found by capability, and what they saw.

The numbers of 0.5.17 are those of sglang PR 34443 with one request and two draft tokens: the plan
is padded to the 4 context-parallel ranks (num_splits 5), the verify batch stays at q 2. On 0.5.20
and 0.5.23 sglang#30296 is unfixed: one request decodes with q 1, the pad makes it 4 and 2
(attention TP 4 and 2), num_splits stays 1 + 1. On 0.5.20 a second DP rank that idles dies in the
indexer at the same moment, so that server has one.
"""

from __future__ import annotations

import contextlib
import os
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from padtrace.contracts.engine import check
from padtrace.explore.differences import compare
from padtrace.recording.model import Event, Recording
from padtrace.recording.reader import read
from padtrace.replay.service import replay
from tests.live import servers
from tests.live.servers import LiveServer

pytestmark = pytest.mark.live
PEER_FAILED = ("forward.failed", True)
WORDS = "num_splits must have shape (b+1)"
SKIP_WARMUP = "--skip-server-warmup"


@dataclass(frozen=True)
class Case:
    """One server that dies, and what must be found in its recording.

    Attributes:
        prompt: tokens of the one request; None where the server's own warm-up is deadly.
        needs: rows that num_splits should have had.
        not_called: hooks whose functions this topology has no use for.
    """

    release: str
    server: dict[str, Any]
    prompt: int | None
    mode: str
    worker: str
    q: int
    num_splits: int
    needs: int
    report: str
    not_called: frozenset[str] = frozenset()


CASES = {
    "0.5.17-prefill-cp": Case(
        "0.5.17",
        {
            "tp": 4,
            "dp": 1,
            "environment": {**os.environ, "SGLANG_ENABLE_CP_V2": "1"},
            "server_arguments": [
                "--enable-prefill-cp",
                "--cp-strategy=interleave",
                SKIP_WARMUP,
                "--speculative-algorithm=EAGLE",
                "--speculative-num-steps=1",
                "--speculative-eagle-topk=1",
                "--speculative-num-draft-tokens=2",
            ],
        },
        16, "TARGET_VERIFY", "target", 2, 5, 3, "sglang#34443",
        # A draft of one step has no plan for several.
        frozenset({"dsa_multi_step.init_forward_metadata"}),
    ),
    "0.5.20": Case(
        "0.5.20",
        {
            "tp": 4,
            "dp": 1,
            "server_arguments": [*servers.EAGLE, SKIP_WARMUP, "--moe-dense-tp-size=1"],
        },
        8, "DECODE", "draft", 4, 2, 5, "sglang#30296",
    ),
    "0.5.23": Case(
        "0.5.23",
        {"tp": 4, "dp": 2, "server_arguments": [*servers.EAGLE, SKIP_WARMUP]},
        8, "DECODE", "draft", 2, 2, 3, "sglang#30296",
    ),
}  # fmt: skip
# What every one of these releases calls on the way, wherever it keeps it.
HOOKS = {
    "forward", "init_new", "prepare_mlp_sync_batch", "_pad_inputs_to_size", "run_batch",
    "dsa.init_forward_metadata", "dsa._compute_flashmla_metadata",
    "dsa_multi_step.init_forward_metadata", "flash_mla_with_kvcache", "get_mla_metadata",
}  # fmt: skip


@dataclass
class Died:
    case: Case
    server: LiveServer
    recorded: Recording


@pytest.fixture(scope="module", params=CASES)
def died(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Died]:
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("release")
    server = servers.start(folder, case.release, **case.server)
    try:
        if case.prompt is not None:
            server.wait_until_ready()
            with contextlib.suppress(urllib.error.URLError, OSError):
                server.ask([case.prompt])
        server.wait(servers.START_SECONDS)
        yield Died(case, server, read(server.recording))
    finally:
        servers.end(server)


def test_it_died_of_it(died: Died) -> None:
    assert f"RuntimeError: {WORDS}" in died.server.log
    assert died.server.answers == []
    assert died.recorded.about["sglang"] == died.case.release


def test_the_same_hooks_are_found_by_capability(died: Died) -> None:
    hooks = died.recorded.coverage["hooks"]
    missing = {n for n in HOOKS if hooks[n]["status"] not in ("found", "moved")}
    idle = {n for n in HOOKS if not any(hooks[n]["fired"].values())}
    assert (missing, idle) == (set(), set(died.case.not_called))
    assert not [name for name, hook in hooks.items() if hook["status"] == "lost"]
    assert died.recorded.rows("process") == 4


def test_it_is_found_with_the_right_numbers(died: Died) -> None:
    case = died.case
    findings = [f for f in check(died.recorded).findings if f.contract == "PT101"]
    assert findings
    seen = {(f.left.value, f.right.value, f.right.expected, f.worker) for f in findings}
    assert seen == {(case.q, case.num_splits, case.needs, case.worker)}
    modes = {
        event["forward_mode"]
        for event in died.recorded.events()
        if event.kind == "forward" and event["failed"] == 1
    }
    assert case.mode in modes
    assert all(case.report in finding.known_reports for finding in findings)


def test_a_replay_on_that_release_agrees_on_every_field(died: Died) -> None:
    replayed = replay(died.recorded)
    compared = replayed.coverage["driven"]["compared"]
    print(f"{compared['values']} values compared in {compared['events']} events")
    assert compared["differences"] == []
    assert compared["values"] > 500
    # What else differs: ranks whose collective failed since another had died, and no rank here has.
    others = {event.values["process"] for event in died.recorded.events() if _of_a_peer(event)}
    differences = compare(died.recorded, replayed).differences
    assert [d for d in differences if (d.field, d.process in others) != PEER_FAILED] == []


def _of_a_peer(event: Event) -> bool:
    frames = event.values.get("frames")
    return isinstance(frames, list) and frames[-1].startswith("torch/distributed/")
