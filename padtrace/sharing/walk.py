"""Every text of a recording's file, where it lies: values and names, known entries and unknown.

Read from the header itself and not from what the reader makes of it, so that nothing hides where
the reader does not look: in an entry it does not know, or in a name that stands there twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Entries of `__metadata__` that are JSON; the others are plain texts.
JSON_ENTRIES = ("about", "absent", "tables", "strings", "facts", "coverage", "values", "digests")
PLAIN_ENTRIES = ("format", "metadata_digest")
METADATA = "__metadata__"


class Pairs(list[tuple[str, Any]]):
    """A JSON object with every name it has, also those that stand there twice."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the file.

    Attributes:
        place: names from the entry down to it, list positions among them.
        is_name: it is the name of an entry, not a value.
    """

    place: tuple[str, ...]
    text: str
    is_name: bool = False


def parsed(text: str | bytes) -> Any:
    """JSON with its objects as `Pairs`.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested too deep.
    """
    return json.loads(text, object_pairs_hook=Pairs)


def texts_of(value: Any, place: tuple[str, ...]) -> Iterator[Text]:
    """The texts of a JSON value, depth first, without recursion."""
    waiting: list[tuple[tuple[str, ...], Any]] = [(place, value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, str):
            yield Text(where, item)
        elif isinstance(item, Pairs):
            for name, inner in item:
                yield Text(where, name, True)
                waiting.append(((*where, name), inner))
        elif isinstance(item, list):
            waiting += [((*where, str(index)), inner) for index, inner in enumerate(item)]


def twice_named(value: Any, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Objects with a name that stands there twice: readers see one of them only."""
    waiting: list[tuple[tuple[str, ...], Any]] = [(place, value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, Pairs):
            if len({name for name, _ in item}) != len(item):
                yield where
            waiting += [((*where, name), inner) for name, inner in item]
        elif isinstance(item, list):
            waiting += [((*where, str(index)), inner) for index, inner in enumerate(item)]
