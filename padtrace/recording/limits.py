"""How much a recording may hold: what is read is refused beyond it, what is written is cut.

Files have limits so that a small one cannot cost much time, memory or screen. The writer cuts what
is longer, with a mark, so that padtrace never writes what it refuses.
"""

from __future__ import annotations

from typing import Any

MAX_STRING = 4096
MAX_STRINGS = 1 << 20
MAX_DEPTH = 32
MAX_OBJECT_BYTES = 16 << 20
MAX_METADATA_BYTES = 48 << 20
MAX_CONTAINERS = 1 << 20
MAX_ITEMS = 1 << 23
MAX_PROCESSES = 4096
# Of every size and number of ranks, and of the ranks that a topology has.
MAX_RANKS = 1 << 16
LOWEST_INTEGER, HIGHEST_INTEGER = -(2**63), 2**64 - 1

TOO_MANY_STRINGS = "[cut: too many strings]"
TOO_DEEP = "[cut: nested too deep]"
_OPENING = ("[", "{")


def problem_of_text(text: str) -> str | None:
    """What is wrong with one JSON entry before it is decoded, in words; None if nothing is."""
    containers = sum(map(text.count, _OPENING))
    if containers > MAX_CONTAINERS:
        return f"it has {containers} lists and objects; the limit is {MAX_CONTAINERS}"
    items = text.count(",")
    return f"it has {items} items; the limit is {MAX_ITEMS}" if items > MAX_ITEMS else None


def problem_of_size(size: int) -> str | None:
    """What is wrong with the bytes of one object; `facts` holds one for each process."""
    return (
        f"it has {size} bytes; the limit is {MAX_OBJECT_BYTES}" if size > MAX_OBJECT_BYTES else None
    )


def problem_of(value: Any) -> str | None:
    """What is wrong with decoded JSON: a string too long, nesting too deep, a number too large."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if len(item) > MAX_STRING:
                    return _long(item)
            elif isinstance(item, dict):
                below += item
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, int) and not LOWEST_INTEGER <= item <= HIGHEST_INTEGER:
                return "it holds an integer of more than 64 bits"
        if not below:
            return None
        level = below
    return f"it is nested deeper than {MAX_DEPTH}"


def problem_of_strings(texts: list[str]) -> str | None:
    """What is wrong with the table of strings."""
    if len(texts) > MAX_STRINGS:
        return f"there are {len(texts)} of them; the limit is {MAX_STRINGS}"
    return next((_long(text) for text in texts if len(text) > MAX_STRING), None)


def cut(text: str) -> str:
    """The string as a file may hold it: what is too long ends with how much was cut."""
    if len(text) <= MAX_STRING:
        return text
    mark = f"... [cut: {len(text)} characters]"
    return text[: MAX_STRING - len(mark)] + mark


def fitted(value: Any, depth: int = 0) -> Any:
    """JSON as a file may hold it: long strings cut, what is nested too deep left out."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, int) and not LOWEST_INTEGER <= value <= HIGHEST_INTEGER:
        return cut(f"{value:#x}")
    if not isinstance(value, (dict, list, tuple)):
        return value
    if depth == MAX_DEPTH:
        return TOO_DEEP
    if isinstance(value, dict):
        return {cut(str(key)): fitted(item, depth + 1) for key, item in value.items()}
    return [fitted(item, depth + 1) for item in value]


def _long(text: str) -> str:
    return f"it holds a string of {len(text)} characters; the limit is {MAX_STRING}"
