"""The plain row rules, against numbers measured on real releases and reported upstream."""

from __future__ import annotations

import pytest

from padtrace.contracts.rows import (
    missing_rows,
    num_splits_agrees,
    num_splits_expected,
    planned_rows,
)


# q rows, num_splits rows, rows missing: sglang#30296 (8 against 7), its small live twin (2
# against 2), PR #34443 before (6 against 9) and after (6 against 7).
@pytest.mark.parametrize(
    ("q_rows", "splits", "missing"), [(8, 7, 2), (2, 2, 1), (6, 9, -2), (6, 7, 0)]
)
def test_reported_lengths(q_rows: int, splits: int, missing: int) -> None:
    assert num_splits_agrees(q_rows, splits) is (missing == 0)
    assert missing_rows(q_rows, splits) == missing


def test_an_empty_batch_still_has_an_end_mark() -> None:
    assert num_splits_expected(0) == 1
    assert planned_rows(1) == 0
