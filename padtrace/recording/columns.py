"""How one column of integers is laid into tensors, and back.

In memory a column is int64 with the codes of `recording.absent`. In a file it takes the narrowest
signed type that holds it, by the first of these encodings that is smallest:

- `constant`: no tensor; the one value stands in the schema.
- `delta`: steps to the row before, for counters and times; at the rows `NAME.fresh_rows` the
  value starts afresh from `NAME.fresh_values`.
- `dictionary`: an index tensor (`NAME`) and a tensor of distinct values (`NAME.dictionary`).
- `plain`: the values.
- `same`: no tensor; another column, named in the schema as `TABLE/COLUMN`, has the very same values
  (the row counts of most fields move together). The writer and the reader see to it.

Absent values take the three lowest numbers of the stored type (see `recording.absent`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padtrace.errors import BadRecordingError
from padtrace.recording.absent import ABSENT_CODES, HIGHEST_ABSENT_CODE

Int64Array = NDArray[np.int64]
IntegerArray = NDArray[np.signedinteger[Any]]

# Each encoding with the suffixes of its further tensors.
ENCODINGS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "plain": ("",),
    "delta": ("", ".fresh_rows", ".fresh_values"),
    "dictionary": ("", ".dictionary"),
    "same": (),
}
_SIGNED_TYPES = (np.int8, np.int16, np.int32, np.int64)
_MAX_DICTIONARY = 2**15


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """A column as a file holds it: its encoding, the constant if any, its tensors by suffix."""

    encoding: str
    constant: int | None
    tensors: dict[str, IntegerArray]


def narrow(values: Int64Array) -> IntegerArray:
    """The same values in the narrowest signed type, absent codes moved to that type's lowest."""
    absent = values <= HIGHEST_ABSENT_CODE
    present = values[~absent]
    low, high = (int(present.min()), int(present.max())) if present.size else (0, 0)
    for candidate in _SIGNED_TYPES:
        limits = np.iinfo(candidate)
        if low > limits.min + 2 and high <= limits.max:
            break
    narrowed: IntegerArray = np.where(absent, 0, values).astype(candidate)
    if absent.any():
        narrowed[absent] = (values[absent] - ABSENT_CODES[0] + limits.min).astype(candidate)
    return narrowed


def widen(stored: IntegerArray) -> Int64Array:
    """The inverse of `narrow`."""
    wide = stored.astype(np.int64)
    lowest = int(np.iinfo(stored.dtype).min)
    absent = wide <= lowest + 2
    if absent.any():
        wide[absent] = wide[absent] - lowest + ABSENT_CODES[0]
    return wide


def encode(values: Int64Array, *, anchor: bool = False) -> EncodedColumn:
    """Choose the smallest encoding of a column.

    Args:
        values: int64, shape (rows,).
        anchor: never `constant`, so that the file proves how many rows its table has.
    """
    if values.size and not anchor and bool((values == values[0]).all()):
        return EncodedColumn("constant", int(values[0]), {})
    best = EncodedColumn("plain", None, {"": narrow(values)})
    for candidate in (_as_delta(values), _as_dictionary(values)):
        if candidate is not None and _bytes(candidate) < _bytes(best):
            best = candidate
    return best


def decode(
    encoding: str,
    constant: int | None,
    tensors: dict[str, IntegerArray],
    rows: int,
    where: str,
) -> Int64Array:
    """Rebuild a column of `rows` int64 values.

    Raises:
        BadRecordingError: the tensors do not fit the encoding or the row count.
    """
    verify(encoding, constant, tensors, rows, where)
    if constant is not None and encoding == "constant":
        return np.broadcast_to(np.int64(constant), (rows,))
    stored = tensors[""]
    if encoding == "plain":
        return widen(stored)
    if encoding == "delta":
        return _from_delta(tensors, rows)
    return widen(tensors[".dictionary"])[stored.astype(np.int64)]


def verify(
    encoding: str,
    constant: int | None,
    tensors: dict[str, IntegerArray],
    rows: int,
    where: str,
) -> None:
    """Whether a column can be rebuilt, without the cost of doing it.

    Raises:
        BadRecordingError: the tensors do not fit the encoding or the row count.
    """
    if encoding == "constant":
        if constant is None:
            raise _bad(where, "a constant column states no value")
        return
    stored = tensors[""]
    if stored.shape != (rows,):
        raise _bad(where, f"it has shape {stored.shape}, its table {rows} rows")
    if encoding == "delta":
        _verify_delta(tensors, rows, where)
    if encoding == "dictionary":
        size = tensors[".dictionary"].size
        if rows and (int(stored.min()) < 0 or int(stored.max()) >= size):
            raise _bad(where, f"an index lies outside its dictionary of {size}")


def _as_delta(values: Int64Array) -> EncodedColumn | None:
    """Steps to the row before; rows whose step is too wide start afresh with their value."""
    if values.size < 2 or bool((values <= HIGHEST_ABSENT_CODE).any()):
        return None
    if int(values.max()) - int(values.min()) >= 2**62:
        return None
    steps = np.diff(values, prepend=values[0])
    best: EncodedColumn | None = None
    for candidate in _SIGNED_TYPES[:-1]:
        limits = np.iinfo(candidate)
        fresh = np.flatnonzero((steps < limits.min) | (steps > limits.max))
        fresh = np.union1d(fresh, [0]).astype(np.int64)
        stored = steps.copy()
        stored[fresh] = 0
        tensors: dict[str, IntegerArray] = {
            "": stored.astype(candidate),
            ".fresh_rows": narrow(fresh),
            ".fresh_values": narrow(values[fresh]),
        }
        encoded = EncodedColumn("delta", None, tensors)
        if best is None or _bytes(encoded) < _bytes(best):
            best = encoded
    return best


def _verify_delta(tensors: dict[str, IntegerArray], rows: int, where: str) -> None:
    fresh, values = widen(tensors[".fresh_rows"]), tensors[".fresh_values"]
    # Compared and not subtracted: the distance to an absent code is wider than int64.
    ordered = fresh.size == values.size and bool((fresh[1:] > fresh[:-1]).all())
    inside = bool(fresh.size) and int(fresh[0]) == 0 and int(fresh[-1]) < rows
    if rows and not (ordered and inside):
        raise _bad(where, "the rows at which its steps start afresh make no sense")


def _from_delta(tensors: dict[str, IntegerArray], rows: int) -> Int64Array:
    if not rows:
        return np.zeros(0, dtype=np.int64)
    fresh, values = widen(tensors[".fresh_rows"]), widen(tensors[".fresh_values"])
    with np.errstate(over="ignore"):
        summed = np.cumsum(tensors[""].astype(np.int64), dtype=np.int64)
        lengths = np.diff(np.append(fresh, rows))
        return summed + np.repeat(values - summed[fresh], lengths)


def _as_dictionary(values: Int64Array) -> EncodedColumn | None:
    if values.size < 16:
        return None
    distinct, index = np.unique(values, return_inverse=True)
    if distinct.size > _MAX_DICTIONARY:
        return None
    return EncodedColumn(
        "dictionary",
        None,
        {"": narrow(index.astype(np.int64)), ".dictionary": narrow(distinct)},
    )


def _bytes(column: EncodedColumn) -> int:
    return sum(tensor.nbytes for tensor in column.tensors.values())


def _bad(where: str, why: str) -> BadRecordingError:
    return BadRecordingError(
        f"bad recording: column {where} cannot be read",
        f"{why}",
        "the file is damaged or was not written by padtrace; ask for it again",
    )
