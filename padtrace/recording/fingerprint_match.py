"""Whether two recordings ran the same source: the hashes of the functions both of them hooked."""

from __future__ import annotations

from padtrace.recording import about, facts
from padtrace.recording.model import Recording


def fingerprints(recording: Recording) -> dict[str, str]:
    """Source hash of every hooked function, "several" where processes differ."""
    merged: dict[str, str] = {}
    for stated in recording.facts:
        for name, value in facts.view(stated).fingerprints.items():
            merged[name] = value if merged.get(name, value) == value else "several"
    return merged


def compare_fingerprints(recorded: Recording, other: Recording | None) -> str:
    """`match`, `differ`, or `unknown` where either side names none in common."""
    if other is None:
        return about.view(recorded.about).fingerprints
    left, right = fingerprints(recorded), fingerprints(other)
    common = left.keys() & right.keys()
    if not common:
        return "unknown"
    return "match" if all(left[name] == right[name] for name in common) else "differ"


def differing_fingerprints(recorded: Recording, other: Recording) -> list[str]:
    """Functions whose source is not the same on both sides."""
    left, right = fingerprints(recorded), fingerprints(other)
    return sorted(name for name in left.keys() & right.keys() if left[name] != right[name])
