"""The three kinds of absent, kept apart.

In Python values `None` means that SGLang held None, `Absent.NO_ATTRIBUTE` that this release has
no such attribute, `Absent.NOT_OBSERVED` that nobody looked. In int64 columns and in ring slots
they are the three lowest numbers; a narrower column in a file uses the three lowest numbers of its
own type, so a code never meets a real row count.
"""

from __future__ import annotations

import enum

NONE_CODE = -(2**63)
NO_ATTRIBUTE_CODE = NONE_CODE + 1
NOT_OBSERVED_CODE = NONE_CODE + 2
HIGHEST_ABSENT_CODE = NOT_OBSERVED_CODE
# In the facts and on the command line: something was set, and its value is not in the file.
NOT_RECORDED = "[not recorded]"
ABSENT_CODES = (NONE_CODE, NO_ATTRIBUTE_CODE, NOT_OBSERVED_CODE)


class Absent(enum.Enum):
    """Why a value that is not None is missing."""

    NO_ATTRIBUTE = "no attribute"
    NOT_OBSERVED = "not observed"

    def __repr__(self) -> str:
        return f"<{self.value}>"


def code_of(value: int | bool | Absent | None) -> int:
    """The int64 that stands for a scalar value, absent ones included."""
    if value is None:
        return NONE_CODE
    if isinstance(value, Absent):
        return NO_ATTRIBUTE_CODE if value is Absent.NO_ATTRIBUTE else NOT_OBSERVED_CODE
    return int(value)


def value_of(code: int) -> int | Absent | None:
    """The inverse of `code_of`; booleans come back as integers."""
    if code > HIGHEST_ABSENT_CODE:
        return code
    if code == NONE_CODE:
        return None
    return Absent.NO_ATTRIBUTE if code == NO_ATTRIBUTE_CODE else Absent.NOT_OBSERVED
