"""Runs the selection code of the CUDA-graph runners, up to the bucket."""

from __future__ import annotations

from typing import Any

from padtrace.recording.facts import Facts
from padtrace.recording.model import Event, Value
from padtrace.replay.worker.capabilities import Capabilities


class GraphJudge:
    """The graph runners of one process, without their captured graphs."""

    def __init__(self, capabilities: Capabilities, facts: Facts, server_args: Any) -> None:
        self._capabilities = capabilities
        self._facts = facts
        self._server_args = server_args

    def unable(self, event: Event) -> str | None:
        """Why an event cannot be replayed, or None."""
        return f"graph: {event.text('runner')} is not replayed"

    def judge(self, event: Event, batch: Any) -> dict[str, Value]:
        raise NotImplementedError
