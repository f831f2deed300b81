"""The one family of errors that padtrace shows to people.

Each error says in one line what happened, in one why, in one what to do, and carries the exit
code of the command that met it. Nothing else may reach a user as a traceback.
"""

from __future__ import annotations

from padtrace.one_line import one_line

EXIT_CLEAN = 0
EXIT_DIVERGENCE = 1
EXIT_USAGE = 2
EXIT_BAD_RECORDING = 3
EXIT_ENVIRONMENT = 4
EXIT_NOTHING_OBSERVED = 5
# Characters of a line; a path may be 4,096 long.
MAX_LINE = 6000
EXIT_INCOMPLETE = 5
EXIT_NOT_REPRODUCED = 6


class PadtraceError(Exception):
    """Base of the family.

    Args:
        what: one line, what happened. Like the others it may name what a file or a process said:
            `lines` escapes what is no plain character.
        why: one line, the reason as far as it is known.
        hint: one line, what to do about it.
    """

    exit_code = EXIT_USAGE

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint

    def lines(self) -> list[str]:
        """The non-empty lines, in the order in which they are printed, fit for a terminal."""
        parts = (self.what, self.why, self.hint)
        return [one_line(part, MAX_LINE) for part in parts if part]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class UsageError(PadtraceError):
    """The command was asked for something that makes no sense (exit code 2)."""

    exit_code = EXIT_USAGE


class BadRecordingError(PadtraceError):
    """A file is damaged, truncated, hostile or no recording at all (exit code 3)."""

    exit_code = EXIT_BAD_RECORDING


class EnvironmentMissingError(PadtraceError):
    """SGLang, a release of it, a capability or an interpreter is missing (exit code 4)."""

    exit_code = EXIT_ENVIRONMENT


class NothingObservedError(PadtraceError):
    """There was nothing to judge, so nothing may be called clean (exit code 5)."""

    exit_code = EXIT_NOTHING_OBSERVED
