"""Graph-mode launches: the captured metadata buffer, its slice for a bucket, the copy into it.

A CUDA graph reads its schedule from a buffer made at capture. Before each replay SGLang slices
``num_splits`` for the rows of this batch (``num_splits[0 : rows + 1]``) and copies the fresh plan
into the slice (``DSAFlashMLAMetadata.slice`` and ``.copy_`` in ``dsa_backend.py``, 0.5.15 to
0.5.23; ``NSAFlashMLAMetadata`` in ``nsa_backend.py`` in 0.5.12). Two tensor rules make this fail
silently: a slice past the end is clamped, and a source of length 1 is broadcast over the whole
slice. A third case is silent as well: a slice shorter than the captured batch leaves the tail of
an older plan, which the graph goes on reading.

Nothing of SGLang's is rebuilt here: the buffer may be SGLang's own object (the worker passes it),
and slicing and copying are always the object's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from padtrace.replay.kernels.interface import Plan


class GraphMetadata(Protocol):
    """What SGLang's ``DSAFlashMLAMetadata`` offers."""

    flashmla_metadata: torch.Tensor
    num_splits: torch.Tensor

    def slice(self, sli: slice) -> Any:
        """A view: the same scheduler rows, ``num_splits`` sliced."""
        ...

    def copy_(self, other: Any) -> None:
        """Copy both tensors of ``other`` into this one's."""
        ...


@dataclass
class PlainGraphMetadata:
    """Two tensors with the same two operations, for where SGLang's class is not at hand."""

    flashmla_metadata: torch.Tensor
    num_splits: torch.Tensor

    @classmethod
    def of(cls, plan: Plan) -> PlainGraphMetadata:
        """Copies of a plan's tensors, as a buffer."""
        return cls(plan.tile_scheduler_metadata.clone(), plan.num_splits.clone())

    def slice(self, sli: slice) -> PlainGraphMetadata:
        """A view of the same memory."""
        return PlainGraphMetadata(self.flashmla_metadata, self.num_splits[sli])

    def copy_(self, other: PlainGraphMetadata) -> None:
        """torch's copy, with torch's broadcasting."""
        self.flashmla_metadata.copy_(other.flashmla_metadata)
        self.num_splits.copy_(other.num_splits)


class CopyCase(Enum):
    """What became of the copy."""

    EQUAL = "equal"
    STALE_TAIL = "stale-tail"
    CLAMPED_SLICE = "clamped-slice"
    BROADCAST = "broadcast"
    REFUSED = "refused"


@dataclass(frozen=True)
class GraphCopy:
    """One slice and copy.

    Attributes:
        case: what happened.
        silent: True where nothing stopped and the graph's schedule is not the plan of its rows.
        clamped: True where the slice has fewer entries than were asked for.
        read_length: entries that the captured kernel reads, captured rows + 1.
        wanted_length: rows + 1, the slice that was asked for.
        slice_length: entries the slice really has.
        source_length: entries of the fresh ``num_splits``.
        error: torch's own text where the copy was refused.
        num_splits: the buffer's values afterwards.
    """

    case: CopyCase
    silent: bool
    clamped: bool
    read_length: int
    wanted_length: int
    slice_length: int
    source_length: int
    error: str | None
    num_splits: tuple[int, ...]


def copy_into_graph(buffer: GraphMetadata, captured_rows: int, rows: int, fresh: Any) -> GraphCopy:
    """Slice a captured buffer for ``rows`` rows, copy a fresh plan into it, and say what happened.

    Args:
        buffer: the metadata that the graph was captured with; changed in place.
        captured_rows: q rows of the captured launch, whose kernel reads that many + 1 entries.
        rows: rows of the batch to replay.
        fresh: object of the buffer's kind with the plan of this batch.
    """
    view = buffer.slice(slice(0, rows + 1))
    slice_length, source_length = int(view.num_splits.shape[0]), int(fresh.num_splits.shape[0])
    error = None
    try:
        view.copy_(fresh)
    except RuntimeError as refused:
        error = str(refused).splitlines()[0]
    clamped = slice_length < rows + 1
    case = _case(clamped, slice_length, source_length, captured_rows + 1, error)
    return GraphCopy(
        case=case,
        silent=case not in (CopyCase.EQUAL, CopyCase.REFUSED),
        clamped=clamped,
        read_length=captured_rows + 1,
        wanted_length=rows + 1,
        slice_length=slice_length,
        source_length=source_length,
        error=error,
        num_splits=tuple(int(value) for value in buffer.num_splits.tolist()),
    )


def _case(clamped: bool, got: int, source: int, read: int, error: str | None) -> CopyCase:
    if error is not None:
        return CopyCase.REFUSED
    if source != got:
        return CopyCase.BROADCAST
    if clamped:
        return CopyCase.CLAMPED_SLICE
    return CopyCase.STALE_TAIL if got < read else CopyCase.EQUAL
