"""Fetches one wheel with pip, unpacks it safely, and can prove later that nothing changed."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import msgspec

from padtrace import children
from padtrace.errors import EnvironmentMissingError

MANIFEST = "padtrace-manifest.json"
MAX_UNPACKED_BYTES = 2 << 30
Say = Callable[[str], None]


class Manifest(msgspec.Struct, kw_only=True):
    """What was fetched.

    Attributes:
        wheel: file name.
        sha256: of the wheel, which pip compared with the hash its index stated.
        record_sha256: of the wheel's own RECORD, the list of its files and their hashes.
        size: bytes unpacked.
    """

    name: str
    version: str
    wheel: str
    sha256: str
    record_sha256: str
    size: int


def fetch(name: str, version: str, target: Path, python: Path, say: Say) -> Manifest:
    """Download `name==version` for `python` and unpack it to `target`, whole or not at all.

    Raises:
        EnvironmentMissingError: pip cannot be had, is offline, or knows no such version.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        wheel = _download(f"{name}=={version}", Path(scratch), python, say)
        say(f"unpacking {wheel.name}")
        unpacked = Path(scratch) / "unpacked"
        size = _unpack(wheel, unpacked)
        manifest = Manifest(
            name=name,
            version=version,
            wheel=wheel.name,
            sha256=_sha256(wheel),
            record_sha256=_sha256(_record(unpacked)),
            size=size,
        )
        (unpacked / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        if target.exists():
            shutil.rmtree(target)
        unpacked.rename(target)
    return manifest


def verify(folder: Path) -> Manifest:
    """Check every file of an unpacked wheel against the hashes it came with.

    Raises:
        EnvironmentMissingError: a file is missing, was changed, or there is no manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise _changed(folder, "it has no manifest: padtrace did not fetch it")
    record = _record(folder)
    if _sha256(record) != manifest.record_sha256:
        raise _changed(folder, f"{record.name} was changed")
    with record.open(newline="") as lines:
        for path, stated, _ in csv.reader(lines):
            if not stated:
                continue
            file = folder / path
            if not file.is_file():
                raise _changed(folder, f"{path} is missing")
            if _record_hash(file) != stated:
                raise _changed(folder, f"{path} was changed")
    return manifest


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


def _download(requirement: str, folder: Path, python: Path, say: Say) -> Path:
    pip = _pip(python)
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    say(f"fetching {requirement}")
    # Raw progress came with pip 24.1; an older pip refuses the option at once.
    code, lines = _run([*command, "--progress-bar=raw", requirement], requirement, say)
    if code == 2:
        code, lines = _run([*command, requirement], requirement, say)
    wheels = list(folder.glob("*.whl"))
    if code or not wheels:
        raise _not_fetched(requirement, lines)
    return wheels[0]


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


def _record_hash(path: Path) -> str:
    """A file's hash as RECORD writes it: URL-safe base64 without padding."""
    with path.open("rb") as file:
        raw = hashlib.file_digest(file, "sha256").digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
