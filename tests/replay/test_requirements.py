"""The two lists of what SGLang needs on a CPU, the Makefile's and the package's, agree."""

from __future__ import annotations

from pathlib import Path

from padtrace.replay import environments

FOLDER = Path(__file__).resolve().parents[2] / "requirements"
# padtrace itself brings these into the Makefile's environment.
OF_PADTRACE = {"msgspec", "numpy", "safetensors"}


def listed(name: str) -> set[str]:
    lines = (FOLDER / name).read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_what_the_replay_needs_is_in_the_makefile_s_environment() -> None:
    missing = set(environments.PACKAGES) - OF_PADTRACE - listed("replay.txt")
    assert missing == set()


def test_both_pin_the_same_torch() -> None:
    assert listed("torch.txt") == {environments.TORCH}
    assert listed("torchvision.txt") == {environments.TORCHVISION}
