"""What counts the steps: the sync collective, or rounds where none runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from padtrace.record.probes.context import Context


class StepCounter:
    """Counts calls of prepare_mlp_sync_batch_raw and of Scheduler.run_batch; writes no event."""

    def __init__(self, context: Context) -> None:
        self._state = context.state
        # Without the gather a call says nothing about the other ranks.
        skip = os.environ.get("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "").lower()
        self._skipped = skip in ("1", "true", "yes", "y")
        self.sync: Callable[..., None] = self._sync
        self.round: Callable[..., None] = self._round
        if context.shared is not None:
            self.sync = context.compiled("step", "", flag=not self._skipped).enter
            self.round = context.compiled("round", "").enter

    def _sync(self, *args: Any, **kwargs: Any) -> None:
        if not self._skipped:
            self._state.count_sync()

    def _round(self, *args: Any, **kwargs: Any) -> None:
        self._state.count_round()
