"""Small words that every report uses, and the console they are printed on.

No string of a file reaches a terminal raw: `plain` and the console make it one line of plain
characters, and what slips past both is escaped where segments leave the console.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from padtrace.one_line import lines, one_line

# Longest text of one cell or line; `--json` has all of it.
MAX_TEXT = 1000
# Widest columns of names: as wide as SGLang's own, so that what is longer leaves the numbers and
# verdicts beside it whole. A release may be a path; its column gives way first.
MAX_MODE, MAX_PADDING, MAX_RELEASE = 16, 8, 24


class _WithoutTrailingSpaces:
    """Passes text on without the blanks that tables leave at the end of a line."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class PlainConsole(Console):
    """A console that reads no markup and sends no control character but its own."""

    def render_str(self, text: str, **options: Any) -> Text:
        """A string given to `print` or to a table is one line, whatever it holds."""
        return super().render_str(one_line(text, MAX_TEXT), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The second wall: also what a view put into a `Text` of its own is plain."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
                continue
            style = segment.style
            if style is not None and style.link:
                style = style.update_link(None)
            yield Segment(lines(segment.text), style)


def console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that wraps at words, highlights nothing by itself and reads no markup."""
    stripped = cast("IO[str]", _WithoutTrailingSpaces(file or sys.stdout))
    return PlainConsole(
        file=stripped, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False
    )


def plain(text: str, style: str | Style = "", limit: int | None = MAX_TEXT) -> Text:
    """The text as one line of plain characters, cut at `limit`."""
    return Text(one_line(text, limit), style=style)


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
