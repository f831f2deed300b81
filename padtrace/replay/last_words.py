"""The last lines that a process wrote to stderr, for the message about its end."""

from __future__ import annotations

import re
import threading
from collections import deque
from typing import IO

_KEPT_LINES = 40
_SHOWN_LINES = 3
_LINE_BYTES = 4096
# What binding libraries say of their own objects when any process with them ends.
_NOISE = re.compile(
    r"nanobind: (leaked|this is likely)| - leaked | - \.\.\. skipped|See https://nanobind"
)


class LastWords:
    """Reads a stream to its end in the background, so that its writer never waits.

    Args:
        stream: stderr of a process.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """The last lines that are not blank, in one; to be asked when the process has ended."""
        self._thread.join(timeout=2)
        shown = [line for line in self._lines if line][-_SHOWN_LINES:]
        return " | ".join(shown) or "it wrote nothing"

    def _read(self) -> None:
        with self._stream:
            while line := self._stream.readline(_LINE_BYTES):
                text = line.decode(errors="replace").rstrip()
                if not _NOISE.match(text):
                    self._lines.append(text)
