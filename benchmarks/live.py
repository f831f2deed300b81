"""Decode steps of a live lab server: padtrace not installed, installed but off, recording.

A server takes half a minute to start, so the variants take turns server by server. It is a tiny
model on a CPU: what is measured is the difference, not the step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import interleave, median

from padtrace.lab.environment import LabSetup, free_port
from padtrace.lab.launcher import LabServer
from padtrace.replay import releases

_PROMPT = list(range(5, 14))
_TOKENS = 65
_REQUESTS = 12
# An allow list of plugins; the lab itself is one of them.
_VARIANTS: dict[str, dict[str, str]] = {
    "not installed": {"SGLANG_PLUGINS": "padtrace_lab"},
    "installed but off": {"SGLANG_PLUGINS": "padtrace,padtrace_lab", "PADTRACE_RECORD": ""},
    "recording": {"SGLANG_PLUGINS": "padtrace,padtrace_lab"},
}


def decode_step_times(sglang: str, rounds: int) -> dict[str, Any]:
    """Milliseconds a decode step takes, by variant: the median over all requests."""
    release = releases.resolve(sglang, None, lambda text: print(text, file=sys.stderr))
    times: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    with tempfile.TemporaryDirectory(prefix="padtrace-bench-") as name:
        folder = Path(name)

        def run(variant: str) -> None:
            times[variant] += _serve(variant, release.root, folder)

        interleave(rounds, list(_VARIANTS), run)
    print(f"\n{'ms a decode step':32}{'best':>10}{'median':>10}")
    for variant, values in times.items():
        print(f"{variant:32}{min(values):10.2f}{median(values):10.2f}")
    return {variant: round(median(values), 3) for variant, values in times.items()}


def _serve(variant: str, root: Path | None, folder: Path) -> list[float]:
    """Start a server of two ranks (DP attention), and time requests one after the other."""
    setup = LabSetup("dense", root, tp=2, dp=2, port=free_port())
    environment = dict(_VARIANTS[variant])
    if variant == "recording":
        environment["PADTRACE_RECORD"] = str(folder / "rings")
    log = folder / "server.log"
    with LabServer(setup, log_path=log, extra_environment=environment) as server:
        outcome = server.wait_until_ready(300)
        if outcome.state != "ready":
            raise SystemExit(f"the lab server did not start: {outcome.reason}")
        server.request(_PROMPT, max_new_tokens=4)
        return [_step(server) for _ in range(_REQUESTS)]


def _step(server: LabServer) -> float:
    """Milliseconds of one decode step: a long answer less a short one, by the steps between."""
    seconds = []
    for tokens in (1, _TOKENS):
        started = time.perf_counter()
        server.request(_PROMPT, max_new_tokens=tokens)
        seconds.append(time.perf_counter() - started)
    return (seconds[1] - seconds[0]) * 1e3 / (_TOKENS - 1)
