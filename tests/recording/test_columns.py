from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padtrace.errors import BadRecordingError
from padtrace.recording.absent import (
    ABSENT_CODES,
    NO_ATTRIBUTE_CODE,
    NONE_CODE,
    NOT_OBSERVED_CODE,
    Absent,
    code_of,
    value_of,
)
from padtrace.recording.columns import decode, encode, narrow, widen

integers = st.one_of(
    st.integers(-(2**63) + 3, 2**63 - 1),
    st.integers(-200, 200),
    st.sampled_from(ABSENT_CODES),
)


@given(st.lists(integers))
def test_narrowing_loses_nothing(values: list[int]) -> None:
    column = np.array(values, dtype=np.int64)
    assert widen(narrow(column)).tolist() == values


@given(st.lists(integers, min_size=1), st.booleans())
def test_every_encoding_gives_the_column_back(values: list[int], anchor: bool) -> None:
    column = np.array(values, dtype=np.int64)
    encoded = encode(column, anchor=anchor)
    back = decode(encoded.encoding, encoded.constant, encoded.tensors, len(values), "t/c")
    assert back.tolist() == values


@given(st.lists(st.sampled_from([3, 10**12, NONE_CODE]), min_size=40, max_size=80))
def test_repeated_wide_values_go_to_a_dictionary(values: list[int]) -> None:
    column = np.array(values, dtype=np.int64)
    encoded = encode(column)
    assert sum(tensor.nbytes for tensor in encoded.tensors.values()) <= len(values) + 24
    back = decode(encoded.encoding, encoded.constant, encoded.tensors, len(values), "t/c")
    assert back.tolist() == values


def test_a_clock_takes_few_bytes() -> None:
    ticks = np.arange(1000, dtype=np.int64) * 50_000 + 1_790_000_000_000_000_000
    encoded = encode(ticks)
    assert encoded.encoding == "delta"
    assert sum(tensor.nbytes for tensor in encoded.tensors.values()) == 1000 * 4 + 1 + 8


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, NONE_CODE),
        (Absent.NO_ATTRIBUTE, NO_ATTRIBUTE_CODE),
        (Absent.NOT_OBSERVED, NOT_OBSERVED_CODE),
        (0, 0),
        (-1, -1),
    ],
)
def test_the_three_absents_are_kept_apart(value: object, code: int) -> None:
    assert code_of(value) == code  # type: ignore[arg-type]
    assert value_of(code) == value


def test_an_index_outside_its_dictionary_is_refused() -> None:
    with pytest.raises(BadRecordingError, match="t/c"):
        decode(
            "dictionary",
            None,
            {"": np.array([5], np.int8), ".dictionary": np.array([1], np.int8)},
            1,
            "t/c",
        )


def test_a_column_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(BadRecordingError, match="t/c"):
        decode("plain", None, {"": np.array([5], np.int8)}, 2, "t/c")


def test_a_constant_column_costs_no_memory() -> None:
    column = decode("constant", 7, {}, 10**9, "t/c")
    assert column.strides == (0,)


def test_processes_one_after_another_stay_narrow() -> None:
    """A counter falls back at each process; that one step must not widen the whole column."""
    counter = np.concatenate([np.arange(100_000), np.arange(100_000), np.arange(100_000)])
    encoded = encode(counter.astype(np.int64))
    assert encoded.tensors[""].dtype == np.int8
    back = decode(encoded.encoding, None, encoded.tensors, counter.size, "t/c")
    assert (back == counter).all()


@pytest.mark.parametrize("fresh", [[], [1], [0, 0], [0, 9]])
def test_fresh_rows_that_make_no_sense_are_refused(fresh: list[int]) -> None:
    tensors = {
        "": np.zeros(4, np.int8),
        ".fresh_rows": np.array(fresh, np.int8),
        ".fresh_values": np.zeros(len(fresh), np.int8),
    }
    with pytest.raises(BadRecordingError, match="t/c"):
        decode("delta", None, tensors, 4, "t/c")
