"""The lab's site folder, for tests of the stub packages in it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from padtrace.lab.environment import SITE

STUBS = ("sgl_kernel", "flash_mla", "torchaudio")


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stub packages importable under their own names; real ones of that name come back."""
    set_aside = take_stub_modules()
    monkeypatch.syspath_prepend(SITE)
    yield
    take_stub_modules()
    sys.modules.update(set_aside)


def take_stub_modules() -> dict[str, object]:
    names = [name for name in sys.modules if name.partition(".")[0] in STUBS]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def python_with_site() -> Callable[..., str]:
    """Run code in a fresh interpreter that has the lab's site on its path; returns its output."""

    def run(code: str, **variables: str) -> str:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PADTRACE_LAB")}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**inherited, "PYTHONPATH": str(SITE), **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    return run
