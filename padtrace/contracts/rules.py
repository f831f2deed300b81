"""The integer rules on whole columns; `contracts/rows.py` holds them for single numbers."""

from __future__ import annotations

from padtrace.recording.columns import Int64Array


def expected_num_splits(q_rows: Int64Array) -> Int64Array:
    """Entries that num_splits needs: one per row of q and the closing one.

    Source: the shape check of the FlashMLA KV-cache kernel, `num_splits must have shape (b+1)`.
    """
    return q_rows + 1
