"""A copy or checkout is called by its path and git's description, not by its version."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from padtrace.replay import checkouts
from padtrace.report.summary import releases
from tests.contracts.builders import agreeing

IDENTITY = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), *IDENTITY, *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A work tree with a package sglang in its folder python, as SGLang's own has it."""
    root = tmp_path / "python"
    (root / "sglang").mkdir(parents=True)
    (root / "sglang" / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    git(tmp_path, "tag", "v0.5.18")
    return root


def test_git_says_where_a_checkout_stands(checkout: Path) -> None:
    assert checkouts.name("~/sglang", checkout) == "~/sglang (v0.5.18)"
    (checkout / "sglang" / "__init__.py").write_text("patched = True")
    assert checkouts.name("~/sglang", checkout) == "~/sglang (v0.5.18-dirty)"


def test_a_copy_that_git_does_not_track_is_its_path(checkout: Path) -> None:
    copy = checkout.parent / "unpacked" / "0.5.18"
    (copy / "sglang").mkdir(parents=True)
    (copy / "sglang" / "__init__.py").write_text("")
    assert checkouts.name("unpacked/0.5.18", copy) == "unpacked/0.5.18"


def test_a_folder_outside_of_any_work_tree_is_its_path(tmp_path: Path) -> None:
    assert checkouts.name("x", tmp_path / "nowhere") == "x"


def test_without_git_it_is_the_path(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert checkouts.name("x", checkout) == "x"


def test_reports_use_that_name() -> None:
    recording = agreeing()
    assert releases(recording) == ["0.5.18"]
    recording.about["sglang_name"] = "~/sglang (v0.5.18-dirty)"
    assert releases(recording) == ["~/sglang (v0.5.18-dirty)"]
