"""Entry point `padtrace` of SGLang's plugin group `sglang.srt.plugins`.

SGLang calls `register()` in every process that loads plugins: HTTP front, controllers,
detokenizer, schedulers. Only schedulers run a model; everywhere else, and wherever recording was
not asked for, this returns at once and has imported nothing but the two modules below.
"""

import os
import sys

# The function in whose process a model runs. (Ray's scheduler actors load no plugins at all.)
_SCHEDULER = "run_scheduler_process"
_started = False


def register() -> None:
    """Start recording in this process, once, if PADTRACE_RECORD is set and it runs a model."""
    global _started
    if not os.environ.get("PADTRACE_RECORD") or _started or not _in_scheduler():
        return
    _started = True
    from padtrace.record.start import start

    start()


def _in_scheduler() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == _SCHEDULER:
            return True
    return False
