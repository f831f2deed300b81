"""A stand-in for `sglang.launch_server`, for tests of the launcher alone: no SGLang in it.

It starts one process per rank, as SGLang does, and these write made events through the real ring.
`--behave` says how it ends. Tests with a real SGLang server are in tests/live.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from padtrace.record import settings, wire
from padtrace.record.ring import EventWriter
from padtrace.recording.absent import NONE_CODE
from tests.record.made_events import MadeRank, rank_facts

RANKS = 2


def scheduler(rank: int, behave: str) -> None:
    found = settings.from_environment(os.environ)
    if found is None:
        os._exit(9)
    writer = EventWriter.create(
        found.folder, size_bytes=found.ring_bytes, policy=found.policy, run=found.run
    )
    arguments = {"api_key": sys.argv[-1], "enable_dp_attention": True}
    writer.facts(rank_facts(tp_rank=rank, tp_size=RANKS, server_args=arguments))
    made = MadeRank(writer, dp_rank=rank, attn_tp=1)
    for number in made.forwards(10**6 if behave == "serve" else 5):
        if behave == "serve":
            time.sleep(0.005)
        if behave == "error" and number == 3 and rank == 1:
            error = {"type": "RuntimeError", "function": "x", "frames": ["a.py:1 f"]}
            head = {"enter_seq": 10**6, "parent": NONE_CODE, "t_ns": time.time_ns()}
            writer.write(wire.kind_index("error"), *made.numbers("error", {**head, **error}))
            time.sleep(60)
    writer.close()
    os._exit(0)


def main() -> None:
    behave = sys.argv[sys.argv.index("--behave") + 1]
    print("plugins:", os.environ.get("SGLANG_PLUGINS"), flush=True)
    print("ready", file=sys.stderr, flush=True)
    if behave == "nothing":
        sys.exit(3)
    if behave == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            scheduler(rank, "serve" if behave == "stubborn" else behave)
        children.append(child)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if behave == "killed":
        time.sleep(0.3)
        os.killpg(0, signal.SIGKILL)
    if behave == "orphans":
        os._exit(5)
    try:
        for child in children:
            os.waitpid(child, 0)
    except KeyboardInterrupt:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        sys.exit(7)


if __name__ == "__main__":
    main()
