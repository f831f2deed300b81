"""Prefill context parallelism: what the eager runner does between pad and plan, and the shard."""

from __future__ import annotations

from typing import Any

from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.snapshots import rows


class Sharding:
    """The context-parallel steps of one release, old way and CP-v2."""

    def __init__(self, capabilities: Capabilities, cp_v2: bool) -> None:
        self._capabilities = capabilities
        self._cp = capabilities.cp_utils if cp_v2 else None

    def active(self, batch: Any) -> bool:
        """Whether this batch goes through CP-v2."""
        if self._cp is None:
            return False
        for name in ("is_cp_v2_active", "is_cp_active"):
            if hasattr(self._cp, name):
                return bool(getattr(self._cp, name)(batch))
        raise self._capabilities.missing("context parallel", "is_cp_v2_active or is_cp_active")

    def prepare(self, batch: Any) -> None:
        """SGLang's `prepare_cp_forward`, where the eager runner would call it."""
        if self.active(batch):
            assert self._cp is not None
            self._capabilities.attribute("context parallel", self._cp, "prepare_cp_forward")(batch)

    def lengths(self, batch: Any, lengths: Any) -> Any:
        """This rank's share of per-token lengths, as the backend takes it."""
        if self.active(batch):
            assert self._cp is not None
            return self._cp.get_cp_strategy().shard_local_tokens(lengths)
        return self._old_way(batch, lengths)

    def query_rows(self, batch: Any) -> int:
        """Rows of this rank's shard of the padded tokens: what reaches the attention call."""
        if self.active(batch) and batch.attn_cp_metadata is not None:
            assert self._cp is not None
            strategy = self._cp.get_cp_strategy()
            return rows(strategy.shard_hidden_states(batch.input_ids.unsqueeze(-1), batch))
        return rows(self._old_way(batch, batch.input_ids))

    def _old_way(self, batch: Any, values: Any) -> Any:
        utils = self._capabilities.dsa_utils
        for family in ("dsa", "nsa"):
            split = getattr(utils, f"{family}_cp_round_robin_split_data", None)
            possible = getattr(utils, f"can_{family}_prefill_cp_round_robin_split", None)
            if split is not None and possible is not None and possible(batch):
                return split(values)
        return values
