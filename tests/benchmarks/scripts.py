"""The benchmark scripts are no package; tests reach their modules here."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import measuring  # noqa: E402
import tile  # noqa: E402
import workload  # noqa: E402

__all__ = ["FOLDER", "measuring", "tile", "workload"]
