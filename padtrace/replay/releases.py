"""Which SGLang: a release from the cache or the network, a path, or the interpreter's own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from padtrace.errors import EnvironmentMissingError, UsageError
from padtrace.replay import environments, wheels
from padtrace.replay.places import cache_folder, release_folders

INSTALLED = "installed"
TESTED = ("0.5.12", "0.5.15", "0.5.16", "0.5.17", "0.5.18", "0.5.20", "0.5.23")
_VERSION = re.compile(r"v?(\d+(\.\d+)+([a-z.]*\d+)*(\+[a-z0-9.]+)?)", re.IGNORECASE)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Release:
    """An SGLang that a worker can import.

    Attributes:
        name: what messages call it.
        root: folder to put first on the worker's path; None for the interpreter's own SGLang.
        source: "wheel" of a release, "checkout" (a folder that was named), or "installed".
    """

    name: str
    root: Path | None
    source: str = "checkout"


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of `padtrace releases`.

    Attributes:
        cached: whether it can be replayed on without the network.
        size: bytes in padtrace's cache; None elsewhere.
    """

    version: str
    cached: bool
    path: Path | None
    size: int | None


def resolve(sglang: str | Path | None, recorded: str | None, say: Say) -> Release:
    """The SGLang that `--sglang` means; fetched if it is a release that is not here.

    Args:
        sglang: a version, a path, "installed", or None for the release that was recorded.
        recorded: the version that the recording names.

    Raises:
        UsageError: neither says anything, or the path holds no SGLang.
        EnvironmentMissingError: the release cannot be had.
    """
    if sglang is None:
        if recorded is None:
            raise UsageError(
                "which SGLang to replay on is not said",
                "the recording names no release (it was made, not recorded)",
                "add --sglang VERSION, for instance --sglang 0.5.18",
            )
        sglang = recorded
    text = str(sglang)
    if text == INSTALLED:
        return Release(INSTALLED, None, INSTALLED)
    found = _VERSION.fullmatch(text)
    if found and not Path(text).exists():
        version = found[1]
        return Release(version, here(version) or fetch(version, say=say), "wheel")
    return Release(text, _root_of(Path(text).expanduser()))


def here(version: str) -> Path | None:
    """The folder of a release that needs no network, or None."""
    for folder in (*release_folders(), _cache()):
        if _holds(folder / version):
            return folder / version
    return None


def fetch(version: str, *, say: Say = lambda text: None) -> Path:
    """Fetch a release into the cache, if it is not here yet; returns its folder.

    Raises:
        EnvironmentMissingError: with pip's reason.
    """
    version = version.removeprefix("v")
    if not _VERSION.fullmatch(version):
        raise UsageError(
            f"{version!r} is no version",
            "a release is named by numbers, such as 0.5.18",
            "`padtrace releases` lists those that padtrace is tested with",
        )
    found = here(version)
    if found is not None:
        return found
    target = _cache() / version
    wheels.fetch("sglang", version, target, environments.interpreter_for_wheels(), say)
    return target


def verify(version: str) -> None:
    """Check a cached release file by file.

    Raises:
        EnvironmentMissingError: it is not cached, or a file was changed.
    """
    wheels.verify(_cached_folder(version))


def remove(version: str) -> None:
    """Remove a release from the cache.

    Raises:
        EnvironmentMissingError: it is not cached.
    """
    shutil.rmtree(_cached_folder(version))


def cached() -> list[str]:
    """Versions in padtrace's cache."""
    folder = _cache()
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((entry.name for entry in entries if _holds(entry)), key=_sort_key)


def listed() -> list[Listed]:
    """Releases that padtrace is tested with, and what else is here."""
    others = {
        entry.name
        for folder in release_folders()
        if folder.is_dir()
        for entry in folder.iterdir()
        if _holds(entry)
    }
    lines = []
    for version in sorted({*TESTED, *cached(), *others}, key=_sort_key):
        path = here(version)
        manifest = wheels.read_manifest(path) if path else None
        lines.append(Listed(version, path is not None, path, manifest.size if manifest else None))
    return lines


def _cache() -> Path:
    return cache_folder() / "releases"


def _cached_folder(version: str) -> Path:
    folder = _cache() / version
    # A version is one name: no path leads out of the cache.
    if not _VERSION.fullmatch(version) or not _holds(folder):
        raise EnvironmentMissingError(
            f"SGLang {version} is not in padtrace's cache",
            f"looked in {_cache()}",
            f"padtrace releases fetch {version}",
        )
    return folder


def _holds(folder: Path) -> bool:
    return (folder / "sglang" / "srt").is_dir()


def _root_of(path: Path) -> Path:
    """The folder to import from: of an unpacked wheel, a checkout, or the package itself."""
    for candidate in (path, path / "python", path.parent):
        if _holds(candidate) and (candidate != path.parent or path.name == "sglang"):
            return candidate.resolve()
    why = f"{path} holds no folder sglang/srt" if path.is_dir() else f"there is no folder {path}"
    raise UsageError(
        f"--sglang {path} is no SGLang",
        why,
        "give a version, an unpacked wheel, a checkout, or `installed`",
    )


def _sort_key(version: str) -> tuple[bool, Version, str]:
    """Versions in their order; a folder that is named otherwise comes last."""
    try:
        return (False, Version(version), version)
    except InvalidVersion:
        return (True, Version("0"), version)
