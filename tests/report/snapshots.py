"""Reports as plain text files, compared line by line.

A report that changed on purpose is written anew with PADTRACE_WRITE_SNAPSHOTS=1; the files are
read by people before they are committed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from padtrace.report.words import console

FOLDER = Path(__file__).parent / "snapshots"
WRITE = "PADTRACE_WRITE_SNAPSHOTS"


def rendered(printer: Callable[[Console], object], width: int) -> str:
    """What a printer prints on a console of some columns that is no terminal."""
    file = io.StringIO()
    printer(console(file, width=width))
    return file.getvalue()


def compare_with_snapshot(name: str, text: str) -> None:
    path = FOLDER / f"{name}.txt"
    if os.environ.get(WRITE) == "1":
        path.write_text(text)
    assert path.exists(), f"no snapshot {path.name}; write it with {WRITE}=1 and read it"
    assert text.splitlines() == path.read_text().splitlines()
