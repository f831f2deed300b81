"""Attribute values as the integers of a snapshot; none of them waits for a device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from padtrace.recording.absent import NONE_CODE, NOT_OBSERVED_CODE

Convert = Callable[[Any], int]

_LIMIT = 1 << 63
NO_LENGTHS = (NONE_CODE, NONE_CODE)
UNKNOWN_LENGTHS = (NOT_OBSERVED_CODE, NOT_OBSERVED_CODE)
# Below this a list of Python integers is cheaper than two reductions in torch.
_SHORT = 64


def rows_of(value: Any) -> int:
    """shape[0] of a tensor, len() of a list; a value of another kind was not observed."""
    if value is None:
        return NONE_CODE
    if value.__class__ is list:
        return len(value)
    try:
        return operator.index(value.shape[0])
    except (AttributeError, IndexError, TypeError):
        return len(value) if isinstance(value, tuple) else NOT_OBSERVED_CODE


def width_of(value: Any) -> int:
    """shape[1] of a tensor with two dimensions or more."""
    if value is None:
        return NONE_CODE
    shape: Any = getattr(value, "shape", ())
    return int(shape[1]) if len(shape) > 1 else NOT_OBSERVED_CODE


def integer_of(value: Any) -> int:
    """A plain integer; never a tensor, whose value could only be had by waiting for the device."""
    if value is None:
        return NONE_CODE
    if isinstance(value, int) and -_LIMIT <= value < _LIMIT:
        return int(value)
    return NOT_OBSERVED_CODE


def namer(string: Callable[[str], int]) -> Convert:
    """A converter of one enum class to string ids (an int enum equals those of other classes)."""
    known: dict[Any, int] = {}

    def name_of(value: Any) -> int:
        if value is None:
            return NONE_CODE
        found = known.get(value)
        if found is None:
            name = getattr(value, "name", None)
            known[value] = found = string(name) if isinstance(name, str) else NOT_OBSERVED_CODE
        return found

    return name_of


def lengths_of(mirror: Any) -> tuple[int, int]:
    """Maximum and sum of seq_lens_cpu; read only if it is really on the host."""
    if not getattr(mirror, "is_cpu", False):
        return UNKNOWN_LENGTHS
    if mirror.shape[0] > _SHORT:
        return int(mirror.max()), int(mirror.sum())
    values = mirror.tolist()
    pair = (max(values), sum(values)) if values else (0, 0)
    return pair if all(-_LIMIT <= number < _LIMIT for number in pair) else UNKNOWN_LENGTHS
