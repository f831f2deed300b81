"""Fetches one wheel with pip, unpacks it safely, and can prove later that nothing changed."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from padtrace import children
from padtrace.errors import EnvironmentMissingError

MANIFEST = "padtrace-manifest.json"
MAX_UNPACKED_BYTES = 2 << 30
NO_HASH = "the index states no hash"
OLD_MANIFEST = "it was fetched by a padtrace that kept no hash of the index"
Say = Callable[[str], None]
_ONE_WHEEL = ("--disable-pip-version-check", "--no-deps", "--only-binary=:all:")
_SHA256 = re.compile("[0-9a-f]{64}")
# What pip logs when it looks for an expected hash among those that the index states.
_MATCHES = re.compile(r"Checked \d+ links for project .* against 1 hashes \((\d+) matches")


class _Archive(msgspec.Struct):
    hashes: dict[str, str] = {}


class _Origin(msgspec.Struct):
    archive_info: _Archive = msgspec.field(default_factory=_Archive)


class _Installed(msgspec.Struct):
    download_info: _Origin


class _Report(msgspec.Struct):
    """What is read of pip's installation report."""

    install: list[_Installed]


class Manifest(msgspec.Struct, kw_only=True):
    """What was fetched.

    Attributes:
        wheel: file name.
        sha256: of the wheel, in hexadecimal digits like all hashes here.
        stated_sha256: what the index says it should be; "" where it says nothing.
        unverified: why the wheel was not held against the index; "" where it was.
        record_sha256: of the wheel's own RECORD, the list of its files and their hashes.
        files: path and sha256 of each file of the wheel; empty in an older manifest.
        size: bytes unpacked.
    """

    name: str
    version: str
    wheel: str
    sha256: str
    record_sha256: str
    size: int
    stated_sha256: str = ""
    unverified: str = OLD_MANIFEST
    files: dict[str, str] = {}


class Download(NamedTuple):
    """A wheel as pip left it, and what its index says of it; see `Manifest`."""

    wheel: Path
    sha256: str
    stated_sha256: str
    unverified: str


def fetch(name: str, version: str, target: Path, python: Path, say: Say) -> Manifest:
    """Download `name==version` for `python` and unpack it to `target`, whole or not at all.

    Raises:
        EnvironmentMissingError: pip cannot be had, is offline, or knows no such version, or the
            wheel is not the one that the index states.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        download = _download(f"{name}=={version}", Path(scratch), python, say)
        wheel = download.wheel
        say(f"unpacking {wheel.name}")
        unpacked = Path(scratch) / "unpacked"
        size = _unpack(wheel, unpacked)
        manifest = Manifest(
            name=name,
            version=version,
            wheel=wheel.name,
            sha256=download.sha256,
            stated_sha256=download.stated_sha256,
            unverified=download.unverified,
            record_sha256=_sha256(_record(unpacked)),
            files={path: _sha256(unpacked / path) for path in _files(unpacked)},
            size=size,
        )
        (unpacked / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        if target.exists():
            shutil.rmtree(target)
        unpacked.rename(target)
    return manifest


def verify(folder: Path) -> Manifest:
    """Check that an unpacked wheel is what was fetched: every file, and no file more.

    Bytecode that Python made when it ran the files cannot be checked; it is removed, and made
    again when it is needed.

    Raises:
        EnvironmentMissingError: a file is missing, was changed or added, or there is no manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise _changed(folder, "it has no manifest: padtrace did not fetch it")
    if manifest.stated_sha256 and manifest.sha256 != manifest.stated_sha256:
        raise _changed(folder, "its wheel is not the one that the index stated")
    for cache in list(folder.rglob("__pycache__")):
        if cache.is_dir() and not cache.is_symlink():
            shutil.rmtree(cache)
    known = _known_files(folder, manifest)
    for path, hashed in known.items():
        file = folder / path
        if file.is_symlink() or not file.is_file():
            raise _changed(folder, f"{path} is missing, or is no file")
        if hashed not in (None, _sha256(file)):
            raise _changed(folder, f"{path} was changed")
    added = sorted(set(_files(folder)) - set(known) - {MANIFEST})
    if added:
        raise _changed(folder, f"{added[0]} was added")
    return manifest


def _known_files(folder: Path, manifest: Manifest) -> dict[str, str | None]:
    """Path and sha256 of what should be there; None where nobody wrote a hash down."""
    record = _record(folder)
    if _sha256(record) != manifest.record_sha256:
        raise _changed(folder, f"{record.name} was changed")
    if manifest.files:
        return {**manifest.files}
    with record.open(newline="") as lines:
        return {
            path: base64.urlsafe_b64decode(stated.removeprefix("sha256=") + "=").hex()
            if stated.startswith("sha256=")
            else None
            for path, stated, _ in csv.reader(lines)
        }


def _files(folder: Path) -> list[str]:
    """What lies below a folder and is no folder, symbolic links included, by relative path."""
    found = []
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        found += [str((Path(place) / name).relative_to(folder)) for name in (*files, *links)]
    return found


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a fetched wheel, or None."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def _changed(folder: Path, why: str) -> EnvironmentMissingError:
    return EnvironmentMissingError(
        f"{folder.name} in the cache is not what was fetched",
        why,
        f"padtrace releases remove {folder.name} && padtrace releases fetch {folder.name}",
    )


def _download(requirement: str, folder: Path, python: Path, say: Say) -> Download:
    """The wheel, held against the hash that the index states where it states one."""
    pip = _pip(python)
    say(f"fetching {requirement}")
    expected = _reported_hash(pip, requirement, folder, say)
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{expected}" if expected else requirement)
    # Only at this level does pip say which hashes the index states.
    command = [*pip, "download", "-vv", *_ONE_WHEEL, "--dest", str(folder)]
    code, lines = _with_progress(command, ["-r", str(wanted)], requirement, say)
    wheels = list(folder.glob("*.whl"))
    if code or not wheels:
        raise _not_fetched(requirement, lines)
    digest = _sha256(wheels[0])
    if expected and digest != expected:
        raise _not_fetched(requirement, [f"ERROR: its hash is {digest}, expected {expected}"])
    unverified = _why_unverified(expected, lines)
    return Download(wheels[0], digest, "" if unverified else expected, unverified)


def _reported_hash(pip: list[str], requirement: str, folder: Path, say: Say) -> str:
    """The sha256 that pip would install; "" from a pip that cannot say (before 22.2).

    Where the index states one it is that; otherwise pip takes it from the file.
    """
    report = folder / "report.json"
    command = [*pip, "install", "--dry-run", "--ignore-installed", *_ONE_WHEEL]
    code, lines = _with_progress(command, ["--report", str(report), requirement], requirement, say)
    if code == 2 and any("no such option" in line for line in lines):
        return ""
    if code:
        raise _not_fetched(requirement, lines)
    try:
        found = msgspec.json.decode(report.read_bytes(), type=_Report)
    except (OSError, msgspec.MsgspecError):
        return ""
    hashes = [part.download_info.archive_info.hashes.get("sha256", "") for part in found.install]
    return hashes[0] if len(hashes) == 1 and _SHA256.fullmatch(hashes[0]) else ""


def _why_unverified(expected: str, lines: list[str]) -> str:
    """What pip said of the hashes it found: "" if the index states the expected one."""
    if not expected:
        return "this pip does not report the hash that the index states"
    matches = [int(found[1]) for line in lines if (found := _MATCHES.search(line))]
    if not matches:
        return "pip did not say whether the index states a hash"
    return "" if max(matches) else NO_HASH


def _with_progress(
    command: list[str], arguments: list[str], requirement: str, say: Say
) -> tuple[int, list[str]]:
    # Raw progress came with pip 24.1; an older pip refuses the option at once.
    code, lines = _run([*command, "--progress-bar=raw", *arguments], requirement, say)
    if code == 2:
        code, lines = _run([*command, *arguments], requirement, say)
    return code, lines


def _pip(python: Path) -> list[str]:
    # A stated interpreter may be a 3.10, which knows no -P; its private folder does the same.
    own = python == Path(sys.executable)
    pip = [*(children.python_command(python) if own else [str(python)]), "-m", "pip"]
    if children.run([*pip, "--version"], _ignored, environment=_environment()) == 0:
        return pip
    raise EnvironmentMissingError(
        "SGLang cannot be fetched: there is no pip",
        f"{python} -m pip does not run",
        f"install pip for {python}, or set PADTRACE_RELEASES to a folder with <version>/sglang",
    )


def _run(command: list[str], requirement: str, say: Say) -> tuple[int, list[str]]:
    lines: list[str] = []

    def on_line(line: str) -> None:
        words = line.split()
        if len(words) == 4 and words[0] == "Progress" and words[2] == "of":
            say(f"fetching {requirement}: {_share(words[1], words[3])}")
        elif line.strip():
            lines.append(line.strip())

    return children.run(command, on_line, environment=_environment()), lines


def _environment() -> dict[str, str]:
    return children.python_environment(os.environ)


def _ignored(line: str) -> None:
    return None


def _share(done: str, total: str) -> str:
    if not (done.isdecimal() and total.isdecimal() and int(total)):
        return done
    return f"{int(done) / 1e6:.0f} of {int(total) / 1e6:.0f} MB"


def _not_fetched(requirement: str, lines: list[str]) -> EnvironmentMissingError:
    unknown = any("No matching distribution" in line for line in lines)
    versions = any("from versions: none" in line.lower() for line in lines)
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    if any("DO NOT MATCH THE HASHES" in line for line in lines):
        return EnvironmentMissingError(
            f"{requirement} could not be fetched",
            "what came is not the file whose hash the index states",
            "try again; if it stays so, somebody changed it on its way: ask who keeps the index",
        )
    if unknown and not versions:
        hint = "check the version; `padtrace releases` lists those that padtrace is tested with"
    else:
        hint = (
            "connect to the network and try again, give --sglang a path, "
            "or set PADTRACE_RELEASES to a folder with <version>/sglang"
        )
    why = errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
    return EnvironmentMissingError(f"{requirement} could not be fetched", why, hint)


def _unpack(wheel: Path, target: Path) -> int:
    with zipfile.ZipFile(wheel) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
        names = [PurePosixPath(entry.filename) for entry in archive.infolist()]
        if total > MAX_UNPACKED_BYTES or any(p.is_absolute() or ".." in p.parts for p in names):
            raise EnvironmentMissingError(
                f"{wheel.name} is not unpacked",
                f"it claims {total} bytes, or a path outside its folder",
                "check where pip fetches from",
            )
        archive.extractall(target)
    return total


def _record(folder: Path) -> Path:
    for candidate in folder.glob("*.dist-info/RECORD"):
        return candidate
    raise _changed(folder, "it has no RECORD of its files")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
