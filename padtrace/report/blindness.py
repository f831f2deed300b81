"""What a recording could not see, and what to turn on to see it."""

from __future__ import annotations

from padtrace.recording import coverage
from padtrace.recording.model import Recording


def blind_spots(recording: Recording) -> list[str]:
    """Hooks that never saw anything, ranks without a file, events that were dropped."""
    lines: list[str] = []
    seen = coverage.view(recording.coverage)
    blind = seen.blind
    if blind.missing_ranks:
        listed = ", ".join(map(str, blind.missing_ranks))
        lines.append(f"ranks without a file: {listed} (merge their folders: padtrace seal)")
    graphs = sum(blind.graph_forwards.values())
    if graphs:
        lines.append(
            f"{graphs:,} forwards ran in replayed graphs (--disable-cuda-graph shows them)"
        )
    dropped = sum(blind.dropped.values())
    if dropped:
        lines.append(f"{dropped:,} events did not fit the ring (record with a larger --ring)")
    for status in ("absent", "lost"):
        names = [name for name, hook in seen.hooks.items() if hook.status == status]
        if names:
            lines.append(f"hooks {status}: {', '.join(sorted(names))}")
    for reason, count in seen.replay.not_replayed.items() if seen.replay else ():
        lines.append(f"not replayed: {reason} ({count})")
    return lines
