"""Notes how the lengths of driven events came about, while SGLang makes them."""

from __future__ import annotations

from collections.abc import Sequence

from padtrace.record import wire
from padtrace.record.state import LAUNCH, PAD, PLAN, UNPAD
from padtrace.recording import schema
from padtrace.replay.worker.provenance import Chain, Provenance, chain_of

_HEADER = len(schema.HEADER)
_ENTER = wire.column_index("plan", "enter_seq")
_PLANNED = wire.column_index("plan", "planned.rows")
_SPLITS = wire.column_index("plan", "num_splits.rows")
_EXPANDED = wire.column_index("plan", "dsa_seqlens_expanded.rows")
_PLAN_OF = wire.column_index("launch", "plan_seq")
_SHAPE = wire.column_index("launch", "q.shape")


class ChainNotes:
    """The chains of one drive, by enter_seq and column."""

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance
        self.chains: dict[int, dict[str, Chain]] = {}
        self._padded = False
        self._pad_chain: Chain = ()
        self._plans: dict[int, Chain] = {}
        provenance.forget()

    def note(self, kind: int, scalars: Sequence[int], values: Sequence[int]) -> None:
        """An event was written; the provenance holds what SGLang's helpers did last."""
        if not self._provenance.enabled:
            return
        if kind == PAD:
            self._pad(scalars[_ENTER])
        elif kind == PLAN:
            self._plan(scalars)
        elif kind == LAUNCH:
            self._launch(scalars, values)
        elif kind == UNPAD:
            self._padded, self._pad_chain = False, ()

    def _pad(self, entered: int) -> None:
        provenance = self._provenance
        if provenance.sizes:
            tokens = provenance.sizes[0][0]
            self._pad_chain = provenance.rows_chain(tokens, tokens)
            self.chains[entered] = {"input_ids.rows": self._pad_chain}
        self._padded = True
        provenance.forget()

    def _plan(self, scalars: Sequence[int]) -> None:
        provenance = self._provenance
        rows, splits = scalars[_PLANNED], scalars[_SPLITS]
        if rows < 0 or splits < 0:
            return
        tokens = provenance.padded_tokens
        if tokens is None or int(tokens) != rows:
            expanded = scalars[_EXPANDED]
            chain = chain_of(expanded if expanded >= 0 else rows)
        else:
            chain = provenance.rows_chain(rows, tokens)
        when = "after" if self._padded else "before"
        chain = (*chain, f"planned {when} the pad -> {rows}")
        made = (*chain, f"num_splits: rows + 1 -> {splits}")
        entered = scalars[_ENTER]
        self.chains[entered] = {"planned.rows": chain, "num_splits.rows": made}
        self._plans[entered] = made
        provenance.forget()

    def _launch(self, scalars: Sequence[int], values: Sequence[int]) -> None:
        plan = self._plans.get(scalars[_PLAN_OF])
        if plan is None or scalars[_SHAPE] < 1:
            return
        rows = values[0]
        chain = self._pad_chain or chain_of(rows)
        if chain[-1].rsplit(" ", 1)[-1] != str(rows):
            chain = (*chain, f"rows that reach the attention layer -> {rows}")
        self.chains[scalars[_ENTER]] = {"q.rows": chain, "num_splits.rows": plan}
