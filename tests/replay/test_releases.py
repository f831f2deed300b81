"""Finding, fetching, checking and removing releases, with real pip and wheels made here."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

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


@pytest.mark.parametrize("change", ["edit", "delete", "record", "manifest"])
def test_a_changed_file_is_found(index: Path, change: str) -> None:
    _wheel(index)
    folder = releases.fetch("9.9.9")
    file = folder / "sglang/srt/layers.py"
    if change == "edit":
        file.write_text("rows = 7\n")
    elif change == "delete":
        file.unlink()
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
