"""Rings of these tests stay in the folder of the test, also where the machine's temporary folder
lies on a file system that padtrace would not trust with them (a container's overlay): hundreds of
rings do not fit a container's shared memory, and no test here fills that disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from padtrace.record import filesystems


@pytest.fixture(autouse=True)
def _rings_stay_here(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    doubtful = filesystems.doubt(handle)
    os.close(handle)
    if doubtful and request.node.get_closest_marker("real_place") is None:
        monkeypatch.setattr(filesystems, "doubt", lambda handle: "")
