"""Start the server's processes by fork instead of spawn.

For speed alone: a spawned process imports SGLang anew, 12 to 18 s of one core each, and a lab
server has 4 to 12 processes on two cores. Forked ones start with what their parent has imported.
PADTRACE_LAB_SPAWN=1 keeps SGLang's own way.
"""

import multiprocessing
import os
import signal

from padtrace.lab.standins.targets import replace


def install() -> None:
    """Turn SGLang's `set_start_method("spawn")` into fork."""
    if os.environ.get("PADTRACE_LAB_SPAWN") == "1":
        return
    original = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force)

    replace(multiprocessing, "set_start_method", set_start_method)
    os.register_at_fork(after_in_child=_forget_parent)


def _forget_parent() -> None:
    """Undo in the child what a spawned one would not have: loaded plugins, signal handlers."""
    from sglang.srt import plugins

    replace(plugins, "_plugins_loaded", False)  # its role may be another
    # A crashing scheduler ends its parent by SIGQUIT; only the first process handles that.
    for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
