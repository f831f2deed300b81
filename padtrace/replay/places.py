"""Where padtrace keeps what it fetched: one cache folder, and folders that others filled."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "PADTRACE_CACHE"
RELEASES_VARIABLE = "PADTRACE_RELEASES"


def cache_folder() -> Path:
    """PADTRACE_CACHE, or `padtrace` in the user's cache folder; may not exist yet."""
    stated = os.environ.get(CACHE_VARIABLE)
    if stated:
        return Path(stated).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).absolute() if base else Path.home() / ".cache") / "padtrace"


def release_folders() -> list[Path]:
    """Folders of PADTRACE_RELEASES, each holding `<version>/sglang`; searched before the cache."""
    stated = os.environ.get(RELEASES_VARIABLE, "")
    return [Path(part).expanduser().absolute() for part in stated.split(os.pathsep) if part]
