"""Finds the rings of a folder, those in shared memory included, and removes them again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from padtrace.errors import UsageError
from padtrace.record import shared_memory
from padtrace.record.ring_folder import FolderRefused, opened
from padtrace.record.ring_format import SUFFIX


@dataclass(slots=True)
class Found:
    """The rings of some folders.

    Attributes:
        rings: the ring files, each once.
        pointers: how those in shared memory were found, by ring.
        problems: one line for each pointer that leads to no ring.
    """

    rings: dict[Path, None] = field(default_factory=dict)
    pointers: dict[Path, shared_memory.Pointed] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def find_rings(sources: Sequence[Path]) -> Found:
    """The rings in folders (not below them), or given by name.

    Raises:
        UsageError: a source does not exist, or is a folder that others can change.
    """
    found = Found()
    for source in sources:
        if source.is_dir():
            _look_into(source, found)
        elif source.is_file():
            found.rings[source] = None
        else:
            raise UsageError(
                f"cannot seal {source}", "there is no such folder or ring", "check the path"
            )
    return found


def rings_in(folder: Path) -> list[Path]:
    """The rings of a folder; none where it cannot be used."""
    try:
        return list(find_rings([folder]).rings)
    except UsageError:
        return []


def remove_sealed(found: Found, sealed: Iterable[Path]) -> list[str]:
    """Remove from shared memory what was sealed; one line for each ring.

    A ring on a disk stays where it is: only memory is dear. So does one that is still written.
    """
    lines = []
    for ring in sealed:
        pointed = found.pointers.get(ring)
        if pointed is None:
            continue
        if shared_memory.in_use(ring):
            lines.append(f"{ring.name} stays in {ring.parent}: its process still runs")
        elif shared_memory.remove(pointed):
            lines.append(f"{ring.name} was removed from {shared_memory.ROOT}")
        else:
            lines.append(f"{ring.name} could not be removed: rm -r {ring.parent}")
    return lines


def remove_folder(folder: Path) -> None:
    """Remove a folder of rings and what it points to in shared memory. Never raises."""
    for pointed in _pointers(folder):
        shared_memory.remove(pointed)
    shutil.rmtree(folder, ignore_errors=True)


def _look_into(folder: Path, found: Found) -> None:
    try:
        with opened(folder) as handle:
            names = sorted(os.listdir(handle))
            pointers = [
                shared_memory.follow(handle, folder / name) for name in names if _points(name)
            ]
    except FolderRefused as refused:
        raise UsageError(
            f"the ring folder {folder} is not used", refused.reason, refused.hint
        ) from refused
    except OSError as error:
        raise UsageError(
            f"cannot read {folder}", str(error.strerror), "check its permissions"
        ) from error
    found.rings.update(dict.fromkeys(folder / name for name in names if name.endswith(SUFFIX)))
    for pointed in pointers:
        if pointed.ring is not None:
            found.rings[pointed.ring] = None
            found.pointers[pointed.ring] = pointed
        elif pointed.problem:
            found.problems.append(pointed.problem)


def _pointers(folder: Path) -> list[shared_memory.Pointed]:
    try:
        with opened(folder) as handle:
            names = filter(_points, os.listdir(handle))
            return [shared_memory.follow(handle, folder / name) for name in names]
    except (OSError, FolderRefused):
        return []


def _points(name: str) -> bool:
    return name.endswith(shared_memory.POINTER_SUFFIX)
