"""Log lines of padtrace inside a server: one line of plain characters, whatever an error says."""

from __future__ import annotations

import contextlib
import logging

from padtrace.one_line import one_line

# An exception of SGLang's can print a whole batch.
MAX_LOG_LINE = 2000


class OneLine(logging.Filter):
    """Escapes the text of each record; the prefix that SGLang gives its log is left alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        # A line that cannot be formed is the handler's to report, as it would be without this.
        with contextlib.suppress(Exception):
            record.msg, record.args = one_line(record.getMessage(), MAX_LOG_LINE), ()
        return True


_ONE_LINE = OneLine()


def make_plain(logger: logging.Logger) -> None:
    """From now on for every line of this logger; asking twice is the same."""
    logger.addFilter(_ONE_LINE)
