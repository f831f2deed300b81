"""Records the shipped samples again: live lab servers and made cases, into recordings/.

Run from the repository root: `.venv/bin/python scripts/record_samples.py`. Takes some minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.live import servers  # noqa: E402
from tests.live.patched import with_30642  # noqa: E402

RELEASE = "0.5.18"
RECORDINGS = ROOT / "recordings"
# SGLang's own way to start its processes, slower than the lab's.
ENVIRONMENT = {**os.environ, "PADTRACE_LAB_SPAWN": "1"}

# Released code dies with attention TP 2, so this one is served by a branch that aligns the plan.
BRANCH = "healthy-dsa-eagle-attention-tp-2"
HEALTHY = {
    "healthy-dsa-eagle": {"tp": 2, "dp": 2, "server_arguments": servers.EAGLE},
    "healthy-dense": {"model": "dense", "tp": 2, "dp": 2},
    BRANCH: {"tp": 4, "dp": 2, "server_arguments": servers.EAGLE},
}
MADE = {
    "30296-draft-extend-bs1-width6-tp8": ("DRAFT_EXTEND_V2", "draft_extend", 1, 6, 8, 1),
    "30296-draft-extend-bs3-width6-tp4": ("DRAFT_EXTEND_V2", "draft_extend", 3, 6, 4, 1),
    "34443-verify-bs1-width6-cp8": ("TARGET_VERIFY", "verify", 1, 6, 1, 8),
}


def record(name: str, arguments: dict[str, object], prompts: tuple[int, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as branch:
        sglang = with_30642(RELEASE, Path(branch)) if name == BRANCH else RELEASE
        server = servers.start(Path(folder), sglang, environment=ENVIRONMENT, **arguments)  # type: ignore[arg-type]
        try:
            if prompts:
                server.wait_until_ready()
                server.ask(prompts[:1])
                server.ask(prompts)
                server.interrupt()
            else:
                server.wait(servers.START_SECONDS)
        finally:
            servers.end(server)
        shutil.copy(server.recording, RECORDINGS / f"{name}.safetensors")
        print(f"recorded {name}")


def make(name: str, case: tuple[str, str, int, int, int, int]) -> None:
    mode, spec, requests, width, attention_tp, context_parallel = case
    text = (
        f'{{"id": "{name}", "input": {{"forward_mode": "{mode}", "spec": "{spec}",'
        f' "width": {width}, "bs": [{requests}], "raw_counts": [{requests}],'
        f' "attn_tp": {attention_tp}, "attn_cp": {context_parallel}, "attn_dp": 1, "dp_rank": 0,'
        f' "cp_v2": {"true" if context_parallel > 1 else "false"}, "is_extend_in_batch": false}}}}'
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        out = RECORDINGS / f"{name}.safetensors"
        command = [sys.executable, "-m", "padtrace", "make", file.name, "-o", str(out), "--force"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    for name, case in MADE.items():
        make(name, case)
    record("crash", {"tp": 4, "dp": 2, "server_arguments": servers.EAGLE}, ())
    for name, arguments in HEALTHY.items():
        record(name, arguments, (3, 17, 70, 1, 9))
