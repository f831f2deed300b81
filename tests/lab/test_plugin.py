"""The gate: without PADTRACE_LAB=1 the entry point changes nothing."""

import subprocess
import sys

import pytest

from padtrace.lab import plugin


@pytest.fixture(autouse=True)
def lab_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PADTRACE_LAB", raising=False)


def test_off_it_imports_no_module() -> None:
    # In a process of its own: here the stand-ins may have been imported by another test.
    code = (
        "import sys; from padtrace.lab import plugin; before = set(sys.modules)\n"
        "plugin.register(); print(sorted(set(sys.modules) - before))\n"
        "print(sorted({'torch', 'sglang', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


@pytest.mark.parametrize("value", [None, "0", "", "yes"])
def test_off_it_leaves_torch_alone(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    if value is not None:
        monkeypatch.setenv("PADTRACE_LAB", value)
    before = (torch.tensor, torch.cuda.synchronize, torch.cuda.get_device_capability)
    plugin.register()
    after = (torch.tensor, torch.cuda.synchronize, torch.cuda.get_device_capability)
    assert all(new is old for new, old in zip(after, before, strict=True))


def test_a_stand_in_without_its_target_ends_the_process() -> None:
    pytest.importorskip("torch", reason="torch is not installed here")
    code = (
        "import os, torch; os.environ['PADTRACE_LAB'] = '1'; del torch.cuda.empty_cache\n"
        "from padtrace.lab import plugin; plugin.register()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "padtrace lab: stand-ins not installed" in done.stderr
    assert "empty_cache" in done.stderr
