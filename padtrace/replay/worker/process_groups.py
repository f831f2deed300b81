"""Process groups of one rank alone: they have a size and a rank, and check shapes.

No other rank is there to be asked. A collective gives back tensors of the right rows, once the rows
that it is given are those its contract asks for; every other call is refused by name.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from padtrace.recording.facts import Facts
from padtrace.replay.worker.standins import not_held


class StrictGroup:
    """One process group.

    Attributes:
        ca_comm: its custom all-reduce, of which only the size limit is asked; None where it is off.
    """

    def __init__(self, name: str, size: int, rank: int, ca_comm: Any = None) -> None:
        self._name = name
        self.world_size = size
        self.rank_in_group = rank
        self.ca_comm = ca_comm

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def all_gather_into_tensor(self, output: Any, input: Any) -> None:
        """Fill [size x rows, ...] with [rows, ...] of every rank; all are this rank's here.

        Raises:
            RuntimeError: the rows do not fit.
        """
        rows = self.world_size * input.shape[0]
        if output.shape[0] != rows or output.shape[1:] != input.shape[1:]:
            raise RuntimeError(
                f"all_gather over {self.world_size} ranks of {self._name}: {list(input.shape)}"
                f" does not fill {list(output.shape)}"
            )
        output.view(self.world_size, *input.shape)[:] = input

    def cp_all_gather_into_tensor_async(self, output: Any, input: Any, stream: Any = None) -> None:
        """The same on a stream of its own, as prefill context parallelism gathers."""
        self.all_gather_into_tensor(output, input)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_held(f"{self.__dict__['_name']} group.{name}")


class ProcessGroups:
    """The groups of one process, by the names of its recorded sizes.

    Args:
        all_reduce: the custom all-reduce of the tensor-parallel group.
    """

    def __init__(self, facts: Facts, all_reduce: Any) -> None:
        parallel = facts.parallel
        self.tp = StrictGroup("tp", parallel.tp_size, parallel.tp_rank, all_reduce)
        self.pp = StrictGroup("pp", parallel.pp_size, parallel.pp_rank)
        self.attn_tp = StrictGroup("attn_tp", parallel.attn_tp_size, parallel.attn_tp_rank)
        self.attn_cp = StrictGroup("attn_cp", parallel.attn_cp_size, parallel.attn_cp_rank)
        self.moe_ep = StrictGroup("moe_ep", parallel.moe_ep_size, 0)

    def published(self) -> dict[str, Any]:
        """By the names of SGLang's runtime context."""
        return {
            "tp_group": self.tp,
            "pp_group": self.pp,
            "attn_tp_group": self.attn_tp,
            "attn_cp_group": self.attn_cp,
        }

    def put_into_globals(self, stack: ExitStack) -> None:
        """Releases keep groups in module globals, some of them beside a runtime context."""
        from sglang.srt.distributed import parallel_state

        for name, group in (
            ("_TP", self.tp),
            ("_PP", self.pp),
            ("_ATTN_TP", self.attn_tp),
            ("_ATTN_CP", self.attn_cp),
            ("_MOE_EP", self.moe_ep),
        ):
            if hasattr(parallel_state, name):
                stack.callback(setattr, parallel_state, name, getattr(parallel_state, name))
                setattr(parallel_state, name, group)
