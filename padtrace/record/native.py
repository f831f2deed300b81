"""The hot classes of the recorder: compiled where the extension was built, else plain Python.

The extension is optional: without a C compiler an installation goes on without it, and so does one
with `PADTRACE_NATIVE=0`. Both write the same records; the compiled ones cost a fraction.

Attributes:
    compiled: the extension, or None.
    why_not: why there is none; "" where there is.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from padtrace.contracts.rows import num_splits_expected
from padtrace.record import ring_core, state_core, wire
from padtrace.record import ring_format as form
from padtrace.recording import absent

VARIABLE = "PADTRACE_NATIVE"

_UPDATED = (
    ("forward", ("exit_seq", "can_run_graph", "failed")),
    ("graph", ("verdict", "bucket_argument", "bucket")),
    ("launch", ("count", "failed", "num_splits.rows")),
)
_LAYOUT = (
    5,  # VERSION in the extension
    form.SLOT_BYTES,
    form.SLOT_HEAD.size,
    form.COUNTERS_OFFSET,
    form.HOOKS_OFFSET,
    form.STATIC_OFFSET,
    form.MAX_HOOKS,
    form.MAX_CHAIN,
    wire.MAX_SCALARS,
    *(form.COUNTER[name] for name in ("events", "updates", "refused", "forwards")),
    *range(len(wire.KINDS)),
    *(wire.column_index(kind, name) for kind, names in _UPDATED for name in names),
    wire.column_index("plan", "planned.rows") - wire.column_index("plan", "entry") - 1,
    num_splits_expected(0),
    absent.NONE_CODE,
    absent.NO_ATTRIBUTE_CODE,
    absent.NOT_OBSERVED_CODE,
)


def _compiled() -> tuple[Any, str]:
    """The extension, or None and why there is none."""
    if os.environ.get(VARIABLE) == "0":
        return None, f"{VARIABLE} is 0"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None, "this interpreter runs without its global lock"
    try:
        from padtrace.record import _native  # type: ignore[attr-defined]
    except ImportError:
        return None, "it was installed without a C compiler"
    if getattr(_native, "LAYOUT", None) != _LAYOUT:
        return None, "the extension is of another version; install padtrace again"
    return _native, ""


compiled: Any
compiled, why_not = _compiled()

if TYPE_CHECKING or compiled is None:
    BatchRecord = state_core.BatchRecord
    Frame = state_core.Frame
    HookCore = state_core.HookCore
    RingCore = ring_core.RingCore
    Snapshot = ring_core.Snapshot
    StateCore = state_core.StateCore
else:
    BatchRecord = compiled.BatchRecord
    Frame = compiled.Frame
    HookCore = compiled.HookCore
    RingCore = compiled.RingCore
    Snapshot = compiled.Snapshot
    StateCore = compiled.StateCore
