"""Fingerprints read from files are those the recorder takes of running functions."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import pytest

from padtrace.recording.reader import read
from padtrace.replay import releases
from padtrace.replay.fingerprints import of_release

BRANCH = """import contextlib


class Pad:
    @contextlib.contextmanager
    def rows(self):
        yield 1  # one

    async def later(self):
        return 2


def last(): return 3
"""
CRASH = Path(__file__).resolve().parents[2] / "recordings" / "crash.safetensors"


def here(version: str) -> Path:
    root = releases.here(version)
    if root is None:
        pytest.skip(f"SGLang {version} is not here: padtrace releases fetch {version}")
    return root


def test_a_file_gives_what_getsource_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "branch.py").write_text(BRANCH)
    monkeypatch.syspath_prepend(tmp_path)
    import branch  # type: ignore[import-not-found]

    names = {
        "branch.Pad.rows": branch.Pad.rows,
        "branch.Pad.later": branch.Pad.later,
        "branch.last": branch.last,
    }
    expected = {
        name: hashlib.blake2b(inspect.getsource(f).encode(), digest_size=16).hexdigest()
        for name, f in names.items()
    }
    wanted = [*names, "branch.Pad.missing", "nowhere.at.all", "../../etc/passwd", "branch"]
    assert of_release(tmp_path, wanted) == expected


@pytest.mark.release
def test_the_recorded_server_ran_the_release_it_names() -> None:
    recorded = read(CRASH).facts[0]["fingerprints"]
    found = of_release(here("0.5.18"), recorded)
    assert len(found) > 30
    assert found == {name: recorded[name] for name in found}


@pytest.mark.release
def test_another_release_differs_where_its_authors_changed_it() -> None:
    """sglang PR 34443 changed cal_padded_tokens between 0.5.17 and 0.5.18."""
    recorded = read(CRASH).facts[0]["fingerprints"]
    found = of_release(here("0.5.17"), recorded)
    name = "sglang.srt.layers.attention.dsa.utils.cal_padded_tokens"
    assert found[name] != recorded[name]
