"""Every contract there is, by id."""

from __future__ import annotations

from padtrace.contracts import num_splits
from padtrace.contracts.model import Contract

_ALL = (num_splits.CONTRACT,)

CONTRACTS: dict[str, Contract] = {contract.id: contract for contract in _ALL}
