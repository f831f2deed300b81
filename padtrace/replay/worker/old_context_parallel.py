"""Prefill context parallelism before CP-v2: the models split and gather the tokens themselves."""

from __future__ import annotations

import inspect
from typing import Any

from padtrace.replay.worker.obstacles import import_or_none


class OldContextParallel:
    """The functions of one release, by the family name that they carry."""

    def __init__(self, utils: Any, functions: Any, family: str) -> None:
        self._utils, self._functions, self._family = utils, functions, family

    @classmethod
    def found(cls, utils: Any) -> OldContextParallel | None:
        """Of this release; None where only CP-v2 is left."""
        for family in ("dsa", "nsa"):
            for name in ("sglang.srt.layers.utils.cp_utils", "sglang.srt.layers.cp_utils"):
                functions = import_or_none(name)
                wanted = ("cp_split_and_rebuild_data", "prepare_context_parallel_metadata")
                there = functions is not None and all(hasattr(functions, one) for one in wanted)
                if there and hasattr(utils, f"can_{family}_cp_split"):
                    return cls(utils, functions, family)
        return None

    def on_cp_v2(self, batch: Any) -> bool:
        """Whether this batch is split at the runner's boundary instead, or not at all.

        A server on CP-v2 splits prefills there. The models of 0.5.16 call the old way for every
        batch still, and assert that a verify's rows divide by the ranks; that is not followed.
        """
        cp = import_or_none("sglang.srt.layers.cp.utils")
        if cp is None:
            return False
        active = getattr(cp, "is_cp_v2_active", None) or getattr(cp, "is_cp_active", None)
        if active is not None and active(batch):
            return True
        on = getattr(cp, "enable_cp_v2", None)
        return on is None or (bool(on()) and not batch.forward_mode.is_context_parallel_extend())

    def enabled(self) -> bool:
        return bool(getattr(self._utils, f"is_{self._family}_enable_prefill_cp")())

    def can_split(self, rows: int, size: int, sparse: bool, batch: Any) -> bool:
        can = getattr(self._utils, f"can_{self._family}_cp_split")
        return bool(can(rows, size, sparse, batch))

    def uses(self, batch: Any) -> bool:
        """Whether the model splits this batch, once its metadata are made."""
        use = getattr(self._utils, f"{self._family}_use_prefill_cp")
        return bool(use(batch, self.enabled()))

    def prepare(self, rows: int, rank: int, size: int, batch: Any) -> Any:
        """The metadata, with the arguments that this release takes."""
        make = self._functions.prepare_context_parallel_metadata
        more: dict[str, Any] = {}
        known = inspect.signature(make).parameters
        if "extend_seqs_len" in known:
            more["extend_seqs_len"] = batch.extend_seq_lens_cpu
        if "device" in known:
            more["device"] = "cpu"
        return make(rows, rank, size, batch.seq_lens_cpu.tolist(), **more)

    def split(self, batch: Any, hidden: Any) -> Any:
        return self._functions.cp_split_and_rebuild_data(batch, hidden)
