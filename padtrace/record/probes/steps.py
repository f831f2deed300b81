"""What counts the steps: the sync collective, or rounds where none runs."""

from __future__ import annotations

import os
from typing import Any

from padtrace.record.state import State


class StepCounter:
    """Counts calls of prepare_mlp_sync_batch_raw and of Scheduler.run_batch; writes no event."""

    def __init__(self, state: State) -> None:
        self._state = state
        # Without the gather a call says nothing about the other ranks.
        skip = os.environ.get("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "").lower()
        self._skipped = skip in ("1", "true", "yes", "y")

    def sync(self, *args: Any, **kwargs: Any) -> None:
        if not self._skipped:
            self._state.count_sync()

    def round(self, *args: Any, **kwargs: Any) -> None:
        self._state.count_round()
