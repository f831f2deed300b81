"""`make demo`: two shipped recordings through real SGLang, each command shown as one would type it.

The recordings diverge, which is the point: `padtrace` then exits with 1, and the demo checks that.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PADTRACE = [sys.executable, "-m", "padtrace"]
RELEASE = ["--sglang", "0.5.18"]
STEPS = [
    (
        "A server died. What its recording says by itself, without SGLang:",
        ["diff", "recordings/crash.safetensors"],
    ),
    (
        "The same recording, replayed through the SGLang release that the server ran:",
        ["replay", "recordings/crash.safetensors"],
    ),
    (
        "A public report that nobody recorded, made from its configuration (sglang#30296):",
        ["replay", "recordings/30296-draft-extend-bs1-width6-tp8.safetensors", *RELEASE],
    ),
]
DIVERGENCE = 1


def main() -> int:
    for title, arguments in STEPS:
        print(f"\n{title}\n\n    $ padtrace {' '.join(arguments)}\n", flush=True)
        code = subprocess.run([*PADTRACE, *arguments], cwd=ROOT, check=False).returncode
        if code != DIVERGENCE:
            print(f"\nThe demo expected exit code {DIVERGENCE} (divergence), got {code}.")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
