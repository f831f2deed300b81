"""Stand-ins for the leaf operations a CPU cannot run, one file per subject.

A stand-in replaces a kernel, a device query or a device guard; it keeps the shape checks the
real one makes. Code that pads, plans or schedules is never replaced. Targets a release does not
have are skipped (`targets.module_if_present`); a target that should be there and is not is an
error.
"""

import os

_installed: list[str] = []


def install(*, runs_model: bool) -> list[str]:
    """Install what this process needs and return the names of all that is installed.

    runs_model: whether this process runs a model (a scheduler). Others get the device queries
    only, which SGLang makes while it resolves server arguments.
    """
    if "process" not in _installed:
        from padtrace.lab.standins import process, process_start

        process.install()
        process_start.install()
        _installed.append("process")
    # A forked scheduler comes here a second time, with its parent's stand-ins in place.
    if runs_model and "communication" not in _installed:
        _installed.extend(_install_model_standins())
    return list(_installed)


def _install_model_standins() -> list[str]:
    from padtrace.lab import counter_test
    from padtrace.lab.standins import communication, fill_value, fp8_guard, kv_cache, seqlens_expand

    # Recorded hooks wrap what they find, so every stand-in is in place before SGLang applies them.
    communication.install()
    kv_cache.install()
    seqlens_expand.install()
    fp8_guard.install()
    fill_value.install()
    indexer = _install_indexer()
    names = ["communication", "kv_cache", "seqlens_expand", "fp8_guard", "fill_value", indexer]
    if counter_test.apply_if_asked():
        names.append("COUNTER-TEST PR 30642")
    return names


def _install_indexer() -> str:
    if os.environ.get("PADTRACE_LAB_REAL_INDEXER") == "1":
        from padtrace.lab.standins import indexer_kernels

        indexer_kernels.install()
        return "indexer_kernels"
    from padtrace.lab.standins import indexer_stub

    indexer_stub.install()
    return "indexer_stub"
