"""`make corpus`: every case of recordings/corpus on every release; recall and precision last."""

from __future__ import annotations

import sys
from pathlib import Path

from padtrace.errors import PadtraceError
from padtrace.explore import corpus

FILE = Path(__file__).resolve().parent.parent / "recordings" / "corpus" / "corpus.json"


def main(releases: list[str]) -> int:
    """Run the corpus on the named releases, by default on all of the file."""
    given = corpus.load(FILE)
    wanted = releases or given.releases
    result = corpus.run(given, wanted, progress=lambda text: print(text, flush=True))
    left_out = sorted(set(given.releases) - set(wanted))
    if left_out:
        print(f"not asked for: SGLang {', '.join(left_out)}")
    if result.not_run:
        print(f"incomplete: {len(result.not_run)} of {len(wanted)} releases were not run")
        return 1
    print(result.line())
    return 0 if result.complete else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PadtraceError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
