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
# Numbers, then parts such as rc1 or .post2, then a local part; each character has one place in it,
# so a hostile text costs no time.
_VERSION = re.compile(
    r"v?([0-9]+(?:\.[0-9]+)+(?:\.?[a-z]+\.?[0-9]+)*(?:\+[a-z0-9.]+)?)", re.IGNORECASE | re.ASCII
)
_MAX_VERSION_LENGTH = 64

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
        unverified: why its wheel was not held against a hash of the index; "" where it was, or
            where padtrace did not fetch it.
    """

    version: str
    cached: bool
    path: Path | None
    size: int | None
    unverified: str = ""


def resolve(sglang: str | Path | None, recorded: str | None, say: Say) -> Release:
    """The SGLang that `--sglang` means; fetched if it is a release that is not here.

    What this gives is executed. A recording therefore chooses a release by its version and no more;
    a folder, or the interpreter's own SGLang, is for the one who runs the command to name.

    Args:
        sglang: a version, a path, "installed", or None for the release that was recorded. A version
            is the release, whatever folder is called so; a `Path` is always a folder.
        recorded: the version that the recording names.

    Raises:
        UsageError: neither says anything, the recording names no version, or the path holds no
            SGLang.
        EnvironmentMissingError: the release cannot be had.
    """
    if sglang is None:
        if recorded is None:
            raise UsageError(
                "which SGLang to replay on is not said",
                "the recording names no release (it was made, not recorded)",
                "add --sglang VERSION, for instance --sglang 0.5.18",
            )
        return _of_version(_recorded_version(recorded), say)
    if isinstance(sglang, str):
        if sglang == INSTALLED:
            return Release(INSTALLED, None, INSTALLED)
        version = as_version(sglang)
        if version is not None:
            return _of_version(version, say)
    return Release(str(sglang), _root_of(Path(sglang).expanduser()))


def as_version(text: str) -> str | None:
    """The version that a text is, without a leading v; None if it is none."""
    found = _VERSION.fullmatch(text) if len(text) <= _MAX_VERSION_LENGTH else None
    return found[1] if found else None


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
    stated, version = version, as_version(version) or ""
    if not version:
        raise UsageError(
            f"{stated!r} is no version",
            "a release is named by numbers, such as 0.5.18",
            "`padtrace releases` lists those that padtrace is tested with",
        )
    found = here(version)
    if found is not None:
        return found
    target = _cache() / version
    wheels.fetch("sglang", version, target, environments.interpreter_for_wheels(), say)
    return target


def verify(version: str) -> str:
    """Check a cached release file by file; returns what it was held against, as a sentence.

    Raises:
        EnvironmentMissingError: it is not cached, or a file was changed.
    """
    manifest = wheels.verify(_cached_folder(version))
    if manifest.unverified:
        return f"as fetched, but unverified: {manifest.unverified}"
    return "as fetched, and as the index states it"


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
        size = manifest.size if manifest else None
        unverified = manifest.unverified if manifest else ""
        lines.append(Listed(version, path is not None, path, size, unverified))
    return lines


def _cache() -> Path:
    return cache_folder() / "releases"


def _cached_folder(version: str) -> Path:
    folder = _cache() / version
    # A version is one name: no path leads out of the cache.
    if as_version(version) is None or not _holds(folder):
        raise EnvironmentMissingError(
            f"SGLang {version} is not in padtrace's cache",
            f"looked in {_cache()}",
            f"padtrace releases fetch {version}",
        )
    return folder


def _holds(folder: Path) -> bool:
    return (folder / "sglang" / "srt").is_dir()


def _of_version(version: str, say: Say) -> Release:
    return Release(version, here(version) or fetch(version, say=say), "wheel")


def _recorded_version(recorded: str) -> str:
    version = as_version(recorded)
    if version is None:
        raise UsageError(
            "the release that the recording names is no version",
            f"it names {recorded[:_MAX_VERSION_LENGTH]!a}; "
            "a recording never chooses a path or the SGLang of this machine",
            "say which SGLang to run: --sglang VERSION, or --sglang PATH for one you trust",
        )
    return version


def _root_of(path: Path) -> Path:
    """The folder to import from: of an unpacked wheel, a checkout, or the package itself."""
    for candidate in (path, path / "python", path.parent):
        if _holds(candidate) and (candidate != path.parent or path.name == "sglang"):
            return candidate.resolve()
    why = f"{path} holds no folder sglang/srt" if path.is_dir() else f"there is no folder {path}"
    raise UsageError(
        f"--sglang {path} is no SGLang",
        why,
        "give a version (always the release), a folder (./0.5.18 is one), or `installed`",
    )


def _sort_key(version: str) -> tuple[bool, Version, str]:
    """Versions in their order; a folder that is named otherwise comes last."""
    try:
        return (False, Version(version), version)
    except InvalidVersion:
        return (True, Version("0"), version)
