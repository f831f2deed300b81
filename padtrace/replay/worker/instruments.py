"""What a worker puts into its release once: kernels, probes, the answer of `init_new`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.leaves import Leaves
from padtrace.replay.worker.not_driven import NotDrivenError
from padtrace.replay.worker.provenance import Provenance
from padtrace.replay.worker.tap import Tap

Answer = Callable[[Any, Any, dict[str, Any]], Any]


class Instruments:
    """See the module.

    Attributes:
        answer: what `init_new(schedule, runner, ...)` gives; None outside a drive.
    """

    def __init__(self, capabilities: Capabilities, provenance: Provenance, device: str) -> None:
        self.provenance = provenance
        self.leaves = Leaves(capabilities, device)
        _ = (
            capabilities.dsa_class,
            capabilities.runner_class,
            capabilities.eager_runner_class,
            capabilities.scale,
        )
        self.leaves.install()
        self.answer: Answer | None = None
        self._replace_init_new(capabilities.batch_class)
        self.tap = Tap(capabilities.batch_class)
        self.tap.install()

    def _replace_init_new(self, batch_class: Any) -> None:
        def init_new(cls: Any, batch: Any, model_runner: Any, *rest: Any, **options: Any) -> Any:
            if self.answer is None or rest:
                raise NotDrivenError("SGLang makes a batch that was not recorded")
            return self.answer(batch, model_runner, options)

        batch_class.init_new = classmethod(init_new)
