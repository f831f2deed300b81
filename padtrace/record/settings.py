"""The environment variables of the recorder: the one place where they are named and read.

    PADTRACE_RECORD   folder for the rings (see docs/rings.md); unset or empty: recording is off
    PADTRACE_TIER     shape (default), meta or full
    PADTRACE_RING     bytes of each process's ring, such as 64M (default) or 1G
    PADTRACE_VALUES   bytes of each process's file of tensor values, with tiers meta and full
    PADTRACE_POLICY   last (default): keep the newest events; first: keep the oldest;
                      error: like last, but stop some events after the first error
    PADTRACE_ALARM    1 (default): one log line when lengths disagree; 0: none
    PADTRACE_NATIVE   0: record with plain Python even where the compiled part is there
    PADTRACE_RUN      names the run; `padtrace record` sets it, so that two runs never mix

A value that cannot be read falls back to its default and is named in `problems`: a typing mistake
must not keep a server from starting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from padtrace.record.ring_format import MAX_BYTES, MIN_BYTES, POLICIES

FOLDER = "PADTRACE_RECORD"
TIER = "PADTRACE_TIER"
RING = "PADTRACE_RING"
VALUES = "PADTRACE_VALUES"
POLICY = "PADTRACE_POLICY"
ALARM = "PADTRACE_ALARM"
RUN = "PADTRACE_RUN"
VARIABLES = (FOLDER, TIER, RING, VALUES, POLICY, ALARM, RUN)

TIERS = ("shape", "meta", "full")
DEFAULT_RING_BYTES = 64 << 20

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d{1,12})\s*([KMG]?)(?:I?B)?", re.IGNORECASE)
_RUN = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks of the recorder.

    Attributes:
        folder: where the rings go.
        ring_bytes: size of each process's ring file.
        run: "" where nobody named the run.
        problems: one line for each variable that could not be read.
        values_bytes: size of each process's file of tensor values; none with tier `shape`.
    """

    folder: Path
    tier: str = "shape"
    ring_bytes: int = DEFAULT_RING_BYTES
    policy: str = "last"
    alarm: bool = True
    run: str = ""
    problems: tuple[str, ...] = ()
    values_bytes: int = DEFAULT_RING_BYTES


def parse_size(text: str) -> int:
    """Bytes of a size such as `64M` (powers of 1024).

    Raises:
        ValueError: it is no size, or outside what a ring can have.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 64M or 1G")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if not MIN_BYTES <= size <= MAX_BYTES:
        raise ValueError(f"{text!r} is outside the sizes a ring can have, 256K to 4G")
    return size


def from_environment(environment: Mapping[str, str]) -> Settings | None:
    """The settings, or None if recording is off. Never raises."""
    folder = environment.get(FOLDER, "")
    if not folder:
        return None
    problems: list[str] = []

    def choice(name: str, allowed: tuple[str, ...]) -> str:
        value = environment.get(name, "").strip().lower()
        if not value or value in allowed:
            return value or allowed[0]
        problems.append(f"{name}={value[:40]!r} is none of {', '.join(allowed)}: {allowed[0]} used")
        return allowed[0]

    run = environment.get(RUN, "")
    if run and not _RUN.fullmatch(run):
        problems.append(f"{RUN} is no name of up to 64 letters, digits, '.', '_', '-': not used")
        run = ""
    return Settings(
        folder=Path(folder),
        tier=choice(TIER, TIERS),
        ring_bytes=_bytes(environment, RING, problems),
        values_bytes=_bytes(environment, VALUES, problems),
        policy=choice(POLICY, POLICIES),
        alarm=choice(ALARM, ("1", "0")) == "1",
        run=run,
        problems=tuple(problems),
    )


def _bytes(environment: Mapping[str, str], name: str, problems: list[str]) -> int:
    text = environment.get(name, "")
    if not text.strip():
        return DEFAULT_RING_BYTES
    try:
        return parse_size(text)
    except ValueError as error:
        problems.append(f"{name}: {error}: 64M used")
        return DEFAULT_RING_BYTES
