"""Every word of the reference stands in the wheel whose wording it claims to have.

``PADTRACE_FLASHMLA_WHEELS`` names a directory with wheels (or unpacked ones); needs no CUDA.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernel reference needs torch")

from padtrace.replay.kernels.compare import generation_of
from padtrace.replay.kernels.generations import Generation
from padtrace.replay.kernels.reference.kernel import ReferenceKernel

from .test_refusals import REFUSALS, dense_call, words_of

DIRECTORY = os.environ.get("PADTRACE_FLASHMLA_WHEELS")
WHEEL = re.compile(r"(sglang_kernel|sgl_kernel|sgl_flash_mla)-([0-9a-z.]+)")
# A message ends where a number is put in.
NUMBER_AT_END = re.compile(r"\d+$")


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


def wheels() -> Iterator[tuple[Generation, str, bytes]]:
    for path in sorted(Path(DIRECTORY or ".").iterdir()):
        found = WHEEL.match(path.name)
        if not found:
            continue
        legacy = "flash_mla" in found[1]
        kind = "flash_mla" if legacy else "sgl_kernel.flash_mla"
        generation = generation_of(Named(f"{kind} ({found[1]} {found[2]})"))  # type: ignore[arg-type]
        inner = "flash_mla/_C_legacy" if legacy else "sgl_kernel/flashmla_ops"
        yield generation, path.name, b"".join(contents(path, inner, kind.split(".")[0]))


def contents(path: Path, library: str, package: str) -> Iterator[bytes]:
    def wanted(name: str) -> bool:
        return name.startswith(library) or (
            name.startswith(package) and name.endswith(("flash_mla.py", "flash_mla_interface.py"))
        )

    if path.is_dir():
        for file in path.rglob("*"):
            if file.is_file() and wanted(file.relative_to(path).as_posix()):
                yield file.read_bytes()
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if wanted(name):
                    yield archive.read(name)


def every_word(generation: Generation) -> set[str]:
    kernel = ReferenceKernel(generation=generation)
    words = {words_of(kernel, case.build(kernel, kernel)) for case in REFUSALS}
    words |= {words_of(kernel, dense_call(**changes)) for changes in ({"head_dim_v": 1},)}
    return {NUMBER_AT_END.sub("", word) for word in words - {"taken", ""}}


@pytest.mark.skipif(not DIRECTORY, reason="PADTRACE_FLASHMLA_WHEELS names no directory of wheels")
def test_words_stand_in_the_wheels() -> None:
    missing: dict[str, list[str]] = {}
    looked_at = 0
    for generation, name, raw in wheels():
        looked_at += 1
        for words in sorted(every_word(generation)):
            # KU_ASSERT puts its sentence together, and Python its strings over several lines.
            core = words.removeprefix("Assertion `").removesuffix("` failed.")
            if core.encode() not in raw:
                missing.setdefault(name, []).append(words)
    assert looked_at
    assert missing == {}
