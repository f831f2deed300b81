"""Row rules as plain integers: shared by the live alarm and the offline checks.

No numpy and no torch here, since the alarm runs in somebody's server before each new kernel shape.
"""

from __future__ import annotations


def num_splits_expected(q_rows: int) -> int:
    """Length that `num_splits` must have for `q_rows` rows of q.

    FlashMLA keeps one running sum per row and one end mark; its `fwd_kvcache_mla` refuses any other
    length with "num_splits must have shape (b+1)".
    """
    return q_rows + 1


def num_splits_agrees(q_rows: int, num_splits_rows: int) -> bool:
    """Whether a FlashMLA call with these lengths passes the kernel's check."""
    return num_splits_rows == num_splits_expected(q_rows)


def planned_rows(num_splits_rows: int) -> int:
    """Rows of q that a `num_splits` of this length was made for; the inverse of the rule above."""
    return num_splits_rows - 1


def missing_rows(q_rows: int, num_splits_rows: int) -> int:
    """Rows by which the plan is too short for q; negative where it is too long."""
    return num_splits_expected(q_rows) - num_splits_rows
