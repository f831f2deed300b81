"""The rebuilt batch refuses fields that no column holds, and only until SGLang sets them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from padtrace.replay.worker.standins import NotHeldError
from padtrace.replay.worker.strict_batch import GIVEN, strict


@dataclasses.dataclass
class ForwardBatch:
    """As SGLang's: fields of which a recording holds some."""

    batch_size: int
    rids_int: Any = None
    secret_rows: Any = None
    other: list[int] = dataclasses.field(default_factory=list)


@pytest.fixture
def batch() -> Any:
    return strict(ForwardBatch, frozenset({"batch_size"}))(batch_size=3)


def test_what_is_held_is_read_and_what_is_listed_has_its_default(batch: Any) -> None:
    assert batch.batch_size == 3
    assert "rids_int" in GIVEN
    assert batch.rids_int is None


@pytest.mark.parametrize("name", ["secret_rows", "other"])
def test_a_field_without_a_column_is_refused_even_with_a_default(batch: Any, name: str) -> None:
    with pytest.raises(NotHeldError) as caught:
        getattr(batch, name, None)
    assert f"forward_batch.{name}" in caught.value.what


def test_what_sglang_sets_itself_is_read(batch: Any) -> None:
    batch.secret_rows = [1]
    assert batch.secret_rows == [1]


def test_a_copy_refuses_the_same_fields_and_keeps_what_was_set(batch: Any) -> None:
    batch.other = [4]
    copied = dataclasses.replace(batch, batch_size=5)
    assert isinstance(copied, ForwardBatch)
    assert (copied.batch_size, copied.other) == (5, [4])
    with pytest.raises(NotHeldError):
        _ = copied.secret_rows
