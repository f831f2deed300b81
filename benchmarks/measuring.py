"""Medians of interleaved rounds, and what the machine was like while they ran."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from statistics import median

__all__ = ["interleave", "median", "note_load", "spread"]


def interleave(rounds: int, variants: Sequence[str], run: Callable[[str], None]) -> None:
    """Run every variant once a round, each round beginning with another one."""
    for number in range(rounds):
        start = number % len(variants)
        for variant in (*variants[start:], *variants[:start]):
            run(variant)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Tenth, half and nine tenths of the values, in order of size."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[last // 10], median(ordered), ordered[last - last // 10]


def note_load() -> str:
    """One line on the machine: its cores and how many processes wanted them."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}"
