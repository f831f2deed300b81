"""The worker process from outside: how it starts, fails and dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from padtrace.errors import EnvironmentMissingError
from padtrace.explore.make import make
from padtrace.replay import environments, service

VERIFY = {"forward_mode": "TARGET_VERIFY", "spec": "verify", "width": 6, "bs": [1], "attn_tp": 8}

pytestmark = pytest.mark.skipif(
    bool(environments.missing_packages()),
    reason="this interpreter lacks what SGLang imports: "
    + " ".join(environments.missing_packages()),
)


def _package(root: Path, source: str) -> Path:
    """A folder that looks like an SGLang whose import runs `source`."""
    place = root / "sglang" / "srt" / "model_executor"
    place.mkdir(parents=True)
    (root / "sglang" / "__init__.py").write_text("__version__ = '9.9.9'\n")
    for folder in (place, place.parent):
        (folder / "__init__.py").write_text("")
    (place / "forward_batch_info.py").write_text(source)
    return root


def test_a_worker_that_dies_shows_its_last_words(tmp_path: Path) -> None:
    source = "import os, sys\nsys.stderr.write('out of memory, so to say\\n')\nos._exit(9)\n"
    with pytest.raises(EnvironmentMissingError) as caught:
        service.replay(make(VERIFY), sglang=_package(tmp_path, source))
    assert "died (exit code 9)" in caught.value.what
    assert "out of memory, so to say" in caught.value.why


def test_what_sglang_prints_does_not_disturb(tmp_path: Path) -> None:
    source = "print('hello from an import' * 100)\nraise ImportError('no such kernel')\n"
    with pytest.raises(EnvironmentMissingError) as caught:
        service.replay(make(VERIFY), sglang=_package(tmp_path, source))
    assert "cannot be imported" in caught.value.what
    assert "no such kernel" in caught.value.why


def test_an_sglang_without_its_batch_names_the_capability(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissingError) as caught:
        service.replay(make(VERIFY), sglang=_package(tmp_path, "class Batch: pass\n"))
    assert "lacks the capability 'forward batch'" in caught.value.what
    assert caught.value.exit_code == 4
