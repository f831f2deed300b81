"""Hooks that wait for an import: called after the module is complete and before it is copied."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from padtrace.record.imports import ImportWatch


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("padtrace_waits_")]:
        del sys.modules[name]


def test_a_patch_reaches_copies_made_by_the_importer(package: Path) -> None:
    (package / "padtrace_waits_kernel.py").write_text("def launch():\n    return 'original'\n")
    (package / "padtrace_waits_user.py").write_text("from padtrace_waits_kernel import launch\n")

    def ready(name: str) -> None:
        sys.modules[name].launch = lambda: "hooked"  # type: ignore[attr-defined]

    watch = ImportWatch(ready)
    watch.wait_for("padtrace_waits_kernel")
    user = importlib.import_module("padtrace_waits_user")
    assert user.launch() == "hooked"
    loader = sys.modules["padtrace_waits_kernel"].__spec__.loader  # type: ignore[union-attr]
    assert "exec_module" not in vars(loader)
    watch.stop()
    assert watch not in sys.meta_path


def test_a_callback_that_fails_does_not_break_the_import(package: Path) -> None:
    (package / "padtrace_waits_plain.py").write_text("value = 3\n")

    def ready(name: str) -> None:
        raise ValueError(name)

    watch = ImportWatch(ready)
    watch.wait_for("padtrace_waits_plain")
    assert importlib.import_module("padtrace_waits_plain").value == 3
    watch.stop()


def test_an_import_that_fails_fails_as_before(package: Path) -> None:
    (package / "padtrace_waits_broken.py").write_text("raise RuntimeError('theirs')\n")
    told: list[str] = []
    watch = ImportWatch(told.append)
    watch.wait_for("padtrace_waits_broken")
    watch.wait_for("padtrace_waits_missing")
    with pytest.raises(RuntimeError, match="theirs"):
        importlib.import_module("padtrace_waits_broken")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("padtrace_waits_missing")
    assert told == []
    watch.stop()


def test_other_modules_are_left_alone(package: Path) -> None:
    watch = ImportWatch(lambda name: None)
    watch.wait_for("padtrace_waits_one")
    assert watch.find_spec("json", None) is None
    watch.stop()
