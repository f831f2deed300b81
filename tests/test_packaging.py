"""The wheel: one top-level package, the lab's stubs inside it and on nobody's path."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from padtrace.record import native

ROOT = Path(__file__).resolve().parent.parent
SERVER_GROUP = "sglang.srt.plugins"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", f"--outdir={out}", str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_one_top_level_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"padtrace"}


def test_the_stubs_are_data_of_the_lab(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for stub in ("sgl_kernel/__init__.py", "flash_mla/__init__.py", "sitecustomize.py"):
        assert f"padtrace/lab/site/{stub}" in names
    assert "padtrace/lab/models/tiny-dsa/config.json" in names
    assert "padtrace/contracts/known_reports.json" in names


def _can_compile() -> bool:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(compiler) is not None and header.exists()


@pytest.mark.skipif(not _can_compile(), reason="there is no C compiler, or no header of Python")
def test_the_extension_is_built_where_it_can_be(wheel: zipfile.ZipFile) -> None:
    # It is optional, so an installation says nothing of a source that does not compile.
    built = [name for name in wheel.namelist() if name.startswith("padtrace/record/_native.")]
    assert [name for name in built if name.endswith((".so", ".pyd"))]
    if os.environ.get(native.VARIABLE) != "0":
        assert native.why_not == ""


def test_no_bytecode_is_in_it(wheel: zipfile.ZipFile) -> None:
    assert not [name for name in wheel.namelist() if "__pycache__" in name]


def test_the_base_install_is_small_and_pins_nothing_of_sglang(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    lines = wheel.read(metadata).decode().splitlines()
    needs = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist")]
    base = [need for need in needs if "extra ==" not in need]
    assert sorted(need.split(">")[0] for need in base) == [
        "msgspec",
        "numpy",
        "packaging",
        "rich",
        "safetensors",
        "typer",
    ]
    assert not [need for need in base if "==" in need or "<" in need]


def test_sglang_finds_both_entry_points() -> None:
    points = importlib.metadata.entry_points(group=SERVER_GROUP)
    ours = {point.name: point.value for point in points if point.name.startswith("padtrace")}
    assert ours == {
        "padtrace": "padtrace.record.plugin:register",
        "padtrace_lab": "padtrace.lab.plugin:register",
    }
    assert all(callable(point.load()) for point in points if point.name in ours)
