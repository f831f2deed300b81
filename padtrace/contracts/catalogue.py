"""Every contract there is, by id. The hundreds of an id are the kind of the catalogue."""

from __future__ import annotations

from padtrace.contracts import (
    graph_buckets,
    host_lengths,
    logits_rows,
    metadata_rows,
    missing_values,
    num_splits,
    page_tables,
    ranks,
    silent_rows,
    stale_plans,
    unpad,
    widths,
)
from padtrace.contracts.model import Contract

_ALL: tuple[Contract, ...] = (
    num_splits.CONTRACT,
    *metadata_rows.CONTRACTS,
    host_lengths.CONTRACT,
    *graph_buckets.CONTRACTS,
    *ranks.CONTRACTS,
    *widths.CONTRACTS,
    *unpad.CONTRACTS,
    *missing_values.CONTRACTS,
    *stale_plans.CONTRACTS,
    *page_tables.CONTRACTS,
    *silent_rows.CONTRACTS,
    *logits_rows.CONTRACTS,
)

CONTRACTS: dict[str, Contract] = {contract.id: contract for contract in _ALL}
