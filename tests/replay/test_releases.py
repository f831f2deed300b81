"""Finding, fetching, checking and removing releases, with real pip and wheels made here."""

from __future__ import annotations

import base64
import hashlib
import http.server
import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from padtrace.errors import EnvironmentMissingError, UsageError
from padtrace.replay import environments, releases, wheels
from padtrace.replay.releases import Release

FILES = {
    "sglang/__init__.py": "__version__ = '9.9.9'\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/layers.py": "rows = 8\n",
}
INFO = "sglang-9.9.9.dist-info"


def _silent(text: str) -> None:
    return None


def _wheel(folder: Path, extra: dict[str, str] | None = None) -> Path:
    """A wheel as pip wants it: files, METADATA, WHEEL and a RECORD of their hashes."""
    files = {
        **FILES,
        **(extra or {}),
        f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{name},sha256={digest.decode()},{len(text)}\n"
    files[f"{INFO}/RECORD"] = record + f"{INFO}/RECORD,,\n"
    path = folder / "sglang-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PADTRACE_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PADTRACE_RELEASES", raising=False)
    return folder


def test_a_release_is_fetched_once_verified_and_removed(index: Path) -> None:
    wheel = _wheel(index)
    told: list[str] = []
    folder = releases.fetch("9.9.9", say=told.append)
    assert (folder / "sglang/srt/layers.py").read_text() == "rows = 8\n"
    manifest = wheels.read_manifest(folder)
    assert manifest is not None
    assert manifest.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert any("fetching" in text for text in told)

    wheel.unlink()
    assert releases.fetch("9.9.9") == folder
    assert releases.resolve("9.9.9", None, _silent) == Release("9.9.9", folder, "wheel")
    assert releases.resolve(None, "9.9.9", _silent) == Release("9.9.9", folder, "wheel")
    assert releases.cached() == ["9.9.9"]
    releases.verify("9.9.9")

    releases.remove("9.9.9")
    assert releases.cached() == []
    with pytest.raises(EnvironmentMissingError):
        releases.verify("9.9.9")


@pytest.fixture(scope="module")
def fetched_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fetched release, to be copied."""
    folder = tmp_path_factory.mktemp("once")
    _wheel(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        wheels.fetch("sglang", "9.9.9", folder / "9.9.9", Path(sys.executable), _silent)
    return folder / "9.9.9"


@pytest.fixture
def fetched(index: Path, fetched_once: Path) -> Path:
    """A fetched release in padtrace's cache."""
    folder = index.parent / "cache" / "releases" / "9.9.9"
    shutil.copytree(fetched_once, folder)
    return folder


CHANGES = [
    "edit",
    "delete",
    "record",
    "manifest",
    "plant",
    "link",
    "linked folder",
    "bytecode only",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_found(fetched: Path, change: str) -> None:
    folder = fetched
    file = folder / "sglang/srt/layers.py"
    if change == "edit":
        file.write_text("rows = 7\n")
    elif change == "delete":
        file.unlink()
    elif change == "plant":
        (folder / "json.py").write_text("import os\n")
    elif change == "link":
        file.rename(folder.parent / "layers.py")
        file.symlink_to(folder.parent / "layers.py")
    elif change == "linked folder":
        (folder / "sglang" / "more").symlink_to(folder.parent)
    elif change == "bytecode only":
        (folder / "json.pyc").write_bytes(b"")
    elif change == "record":
        file.write_text("rows = 7\n")
        record = folder / INFO / "RECORD"
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"rows = 7\n").digest()).rstrip(b"=")
        lines = [
            f"sglang/srt/layers.py,sha256={digest.decode()},9"
            if line.startswith("sglang/srt/layers.py")
            else line
            for line in record.read_text().splitlines()
        ]
        record.write_text("\n".join(lines))
    else:
        (folder / wheels.MANIFEST).unlink()
    with pytest.raises(EnvironmentMissingError) as caught:
        releases.verify("9.9.9")
    assert "releases fetch 9.9.9" in caught.value.hint


class Index(http.server.SimpleHTTPRequestHandler):
    """A package index of one wheel, as `stated` says: PEP 503 (HTML) or PEP 691 (JSON)."""

    stated: ClassVar[dict[str, str]] = {}
    json_page = False
    wheel = b""
    served = 0

    def do_GET(self) -> None:
        name = "sglang-9.9.9-py3-none-any.whl"
        if self.path.endswith(name):
            type(self).served += 1
            self._answer("application/zip", self.wheel)
        elif self.json_page:
            page = {"meta": {"api-version": "1.0"}, "name": "sglang", "files": [
                {"filename": name, "url": f"/files/{name}", "hashes": self.stated}
            ]}  # fmt: skip
            self._answer("application/vnd.pypi.simple.v1+json", json.dumps(page).encode())
        else:
            fragment = "".join(f"#{kind}={value}" for kind, value in self.stated.items())
            page_text = f'<a href="/files/{name}{fragment}">{name}</a>'
            self._answer("text/html", page_text.encode())

    def log_message(self, format: str, *args: object) -> None:
        return None

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def served(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    """An index over HTTP that is pip's only one; the test says what it states."""
    handler = type("OneIndex", (Index,), {"wheel": _wheel(index).read_bytes()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip-cache"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield handler
        server.shutdown()


@pytest.mark.parametrize("json_page", [False, True])
def test_a_wheel_is_held_against_the_hash_of_the_index(
    served: type[Index], json_page: bool
) -> None:
    digest = hashlib.sha256(served.wheel).hexdigest()
    served.stated, served.json_page = {"sha256": digest}, json_page
    manifest = wheels.read_manifest(releases.fetch("9.9.9"))
    assert manifest is not None
    assert (manifest.stated_sha256, manifest.sha256, manifest.unverified) == (digest, digest, "")
    assert releases.verify("9.9.9") == "as fetched, and as the index states it"
    (line,) = [line for line in releases.listed() if line.version == "9.9.9"]
    assert line.unverified == ""


@pytest.mark.parametrize("json_page", [False, True])
def test_an_index_without_hashes_is_said_to_be_one(served: type[Index], json_page: bool) -> None:
    served.json_page = json_page
    manifest = wheels.read_manifest(releases.fetch("9.9.9"))
    assert manifest is not None
    assert manifest.sha256 == hashlib.sha256(served.wheel).hexdigest()
    assert (manifest.stated_sha256, manifest.unverified) == ("", wheels.NO_HASH)
    assert releases.verify("9.9.9") == f"as fetched, but unverified: {wheels.NO_HASH}"
    (line,) = [line for line in releases.listed() if line.version == "9.9.9"]
    assert line.unverified == wheels.NO_HASH


@pytest.mark.parametrize("json_page", [False, True])
def test_a_wheel_that_is_not_the_stated_one_is_not_fetched(
    served: type[Index], json_page: bool
) -> None:
    served.stated, served.json_page = {"sha256": "0" * 64}, json_page
    with pytest.raises(EnvironmentMissingError) as caught:
        releases.fetch("9.9.9")
    assert "the index states" in caught.value.why
    assert served.served > 0
    assert releases.cached() == []


def test_a_file_that_changes_between_two_requests_is_not_fetched(served: type[Index]) -> None:
    """The hash is asked for first; whoever then sends another file is found out."""
    first = served.wheel

    class Changing:
        def __get__(self, instance: object, owner: type[Index]) -> bytes:
            return first if owner.served <= 1 else first + b"more"

    served.wheel = Changing()  # type: ignore[assignment]
    with pytest.raises(EnvironmentMissingError) as caught:
        releases.fetch("9.9.9")
    assert "the index states" in caught.value.why
    assert releases.cached() == []


def test_a_pip_that_cannot_report_fetches_and_says_so(
    served: type[Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = wheels._run

    def old(command: list[str], *rest: Any) -> tuple[int, list[str]]:
        return (2, ["no such option: --dry-run"]) if "--report" in command else run(command, *rest)

    monkeypatch.setattr(wheels, "_run", old)
    releases.fetch("9.9.9")
    assert "unverified: this pip does not report" in releases.verify("9.9.9")


def test_a_folder_of_wheels_states_no_hash(index: Path) -> None:
    _wheel(index)
    releases.fetch("9.9.9")
    assert wheels.NO_HASH in releases.verify("9.9.9")


def test_bytecode_made_by_running_is_removed_not_believed(fetched: Path) -> None:
    folder = fetched
    source = folder / "sglang/srt/layers.py"
    # Python believes a cached file whose source has the size and the time it states.
    planted = source.with_name("planted.py")
    planted.write_text("rows = 7\n")
    os.utime(planted, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))
    cached = py_compile.compile(str(planted), importlib.util.cache_from_source(str(source)))
    planted.unlink()
    command = [sys.executable, "-c", "import sglang.srt.layers as m; print(m.rows)"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}

    def rows() -> str:
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    assert rows() == "7\n"
    releases.verify("9.9.9")
    assert not Path(str(cached)).exists()
    assert rows() == "8\n"
    releases.verify("9.9.9")


def test_a_release_fetched_by_an_older_padtrace_is_used_and_what_is_missing_is_said(
    fetched: Path,
) -> None:
    folder = fetched
    written = json.loads((folder / wheels.MANIFEST).read_bytes())
    kept = ("name", "version", "wheel", "sha256", "record_sha256", "size")
    (folder / wheels.MANIFEST).write_text(json.dumps({key: written[key] for key in kept}))
    assert releases.resolve("9.9.9", None, _silent) == Release("9.9.9", folder, "wheel")
    assert releases.verify("9.9.9") == f"as fetched, but unverified: {wheels.OLD_MANIFEST}"
    (folder / "json.py").write_text("import os\n")
    with pytest.raises(EnvironmentMissingError, match="not what was fetched"):
        releases.verify("9.9.9")


def test_offline_says_what_to_do(index: Path) -> None:
    with pytest.raises(EnvironmentMissingError) as caught:
        releases.fetch("9.9.9")
    assert "sglang==9.9.9 could not be fetched" in caught.value.what
    assert "PADTRACE_RELEASES" in caught.value.hint
    assert not list((index.parent / "cache" / "releases").iterdir())


def test_an_unknown_version_is_not_called_offline(index: Path) -> None:
    _wheel(index)
    with pytest.raises(EnvironmentMissingError) as caught:
        releases.fetch("9.9.10")
    assert caught.value.hint.startswith("check the version")


def test_a_wheel_that_leaves_its_folder_is_not_unpacked(index: Path) -> None:
    _wheel(index, {"../../outside.py": "x = 1\n"})
    with pytest.raises(EnvironmentMissingError) as caught:
        releases.fetch("9.9.9")
    assert "not unpacked" in caught.value.what
    assert not (index.parent / "outside.py").exists()


def test_a_folder_of_unpacked_releases_needs_no_network(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "unpacked" / "0.5.18" / "sglang" / "srt"
    place.mkdir(parents=True)
    monkeypatch.setenv("PADTRACE_RELEASES", str(tmp_path / "unpacked"))
    assert releases.fetch("0.5.18") == tmp_path / "unpacked" / "0.5.18"
    line = next(line for line in releases.listed() if line.version == "0.5.18")
    assert line.cached
    assert line.size is None


def test_paths_mean_wheels_checkouts_and_packages(tmp_path: Path) -> None:
    wheel, checkout = tmp_path / "wheel", tmp_path / "checkout"
    (wheel / "sglang" / "srt").mkdir(parents=True)
    (checkout / "python" / "sglang" / "srt").mkdir(parents=True)
    assert releases.resolve(wheel, None, _silent).root == wheel
    assert releases.resolve(wheel / "sglang", None, _silent).root == wheel
    assert releases.resolve(checkout, None, _silent).root == checkout / "python"
    assert releases.resolve("installed", "0.5.18", _silent) == Release(
        "installed", None, "installed"
    )


@pytest.mark.parametrize("text", ["/nowhere/at/all", "latest", "..", "0.5.x"])
def test_what_is_no_sglang_is_a_usage_error(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        releases.resolve(text, None, _silent)


def test_a_made_recording_does_not_say_which_sglang() -> None:
    with pytest.raises(UsageError) as caught:
        releases.resolve(None, None, _silent)
    assert "--sglang" in caught.value.hint


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which holds an SGLang under many a name."""
    for name in ("0.5.18", "v9.9.9", "latest", "installed", "9.9.9 ", "-e", "9.9.9;x"):
        (tmp_path / "here" / name / "sglang" / "srt").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(
    "recorded",
    ["", " ", "installed", "latest", "./0.5.18", "0.5.18/", "../here/0.5.18", "~/sglang", ".", "-e",
     "9.9.9 ", "9.9.9\n", "\n9.9.9", "9.9.9;x", "9.9.9[all]", "9.9.9 @ file:///tmp/x", "==9.9.9",
     "https://example.org/sglang.whl", "[bold]9.9.9[/bold]", "\x1b[2J", "\u202e9.9.9", "9.9.\u0669",
     "9.9.9\u017f1", "0.5." + "1" * 80, "9", "9.9.9+", "9.9.9+a/b", "9..9", "\x00", "9.9.9\x00"],
)  # fmt: skip
def test_a_recording_names_a_version_and_nothing_else(recorded: str, checkout: Path) -> None:
    with pytest.raises(UsageError, match="is no version") as caught:
        releases.resolve(None, recorded, _silent)
    assert "a recording never chooses" in caught.value.why
    assert all(line.isascii() and line.isprintable() for line in caught.value.lines())
    assert "--sglang" in caught.value.hint


def test_a_recorded_path_absolute_and_there_is_refused(checkout: Path) -> None:
    with pytest.raises(UsageError, match="is no version"):
        releases.resolve(None, str(checkout / "0.5.18"), _silent)
    # The same on the command line is somebody's choice.
    assert releases.resolve(str(checkout / "0.5.18"), None, _silent).source == "checkout"


@pytest.mark.parametrize(
    "name", ["9.9.9", "0.5.0rc0", "0.5.3.post1", "v0.5.18", "0.5.6.post2.dev81+g6d4f0f2.d20251201"]
)
def test_versions_of_sglang_are_versions(name: str) -> None:
    assert releases.as_version(name) == name.removeprefix("v")


@pytest.mark.parametrize("part", ["1", ".1", "a1", ".a.1", "1a", "+a"])
def test_a_hostile_version_costs_no_time(part: str) -> None:
    # Were it tried in all ways, each of these would take longer than the universe is old.
    assert releases.as_version("0.5." + part * (58 // len(part)) + "!") is None


def test_a_version_means_the_release_whatever_folder_is_called_so(
    index: Path, checkout: Path
) -> None:
    _wheel(index)
    for text in ("9.9.9", "v9.9.9"):
        assert releases.resolve(text, None, _silent).source == "wheel"
    (checkout / "9.9.9" / "sglang" / "srt").mkdir(parents=True)
    for given in ("./9.9.9", "9.9.9/", Path("9.9.9")):
        found = releases.resolve(given, "0.5.18", _silent)
        assert (found.root, found.source) == (checkout / "9.9.9", "checkout")
    with pytest.raises(EnvironmentMissingError, match=r"0\.5\.18 could not be fetched"):
        releases.resolve("0.5.18", None, _silent)


@pytest.mark.parametrize("version", ["../0.5.18", "", "0.5.18/../x", "/etc"])
def test_a_version_is_never_a_path(version: str) -> None:
    with pytest.raises((EnvironmentMissingError, UsageError)):
        releases.remove(version)
    with pytest.raises((EnvironmentMissingError, UsageError)):
        releases.fetch(version)


def test_a_stated_interpreter_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADTRACE_REPLAY_PYTHON", "/no/such/python")
    with pytest.raises(EnvironmentMissingError) as caught:
        environments.replay_interpreter(_silent)
    assert "/no/such/python" in caught.value.what
