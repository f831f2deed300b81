"""Small words that every report uses, and the console they are printed on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any, cast

from rich.console import Console


class _WithoutTrailingSpaces:
    """Passes text on without the blanks that tables leave at the end of a line."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that wraps at words and highlights nothing by itself."""
    stripped = cast("IO[str]", _WithoutTrailingSpaces(file or sys.stdout))
    return Console(file=stripped, width=width, highlight=False, soft_wrap=False, emoji=False)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    parts: list[str] = []
    for start, end in _runs(ranks):
        parts.append(str(start) if start == end else f"{start}-{end}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts) or 'unknown'}"


def _runs(ranks: Sequence[int]) -> Iterable[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs
