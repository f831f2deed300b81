"""Entry point `padtrace_lab` of SGLang's plugin group `sglang.srt.plugins`.

SGLang calls `register()` in every process that loads plugins. Installed in somebody's real
server it must cost nothing and change nothing, so this module imports only the standard library
and everything else waits behind the switch PADTRACE_LAB=1, which the lab's launcher sets.
"""

import os
import sys


def register() -> None:
    """Install the lab's stand-ins in this process if PADTRACE_LAB is 1.

    Raises SystemExit when a stand-in cannot be installed: SGLang logs and forgets any other
    exception of a plugin, and a server with half its stand-ins fails later for no visible reason.
    """
    if os.environ.get("PADTRACE_LAB") != "1":
        return
    # Elsewhere (HTTP front, detokenizer) only server arguments are read; loading the attention
    # backends there costs seconds of start-up for nothing.
    runs_model = _called_from("run_scheduler_process")
    from padtrace.lab import standins

    try:
        names = standins.install(runs_model=runs_model)
    except Exception as error:
        raise SystemExit(f"padtrace lab: stand-ins not installed: {error!r}") from error
    print(f"padtrace lab: process {os.getpid()}: {', '.join(names)}", file=sys.stderr, flush=True)


def _called_from(function_name: str) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == function_name:
            return True
    return False
