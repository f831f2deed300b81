"""What a recording could not see, and what to turn on to see it."""

from __future__ import annotations

from padtrace.recording.model import Recording


def blind_spots(recording: Recording) -> list[str]:
    """Hooks that never saw anything, ranks without a file, events that were dropped."""
    lines: list[str] = []
    blind = recording.coverage.get("blind")
    blind = blind if isinstance(blind, dict) else {}
    missing = blind.get("missing_ranks") or []
    if missing:
        listed = ", ".join(str(rank) for rank in missing)
        lines.append(f"ranks without a file: {listed} (merge their folders: padtrace seal)")
    graphs = _total(blind.get("graph_forwards"))
    if graphs:
        lines.append(
            f"{graphs:,} forwards ran in replayed graphs (--disable-cuda-graph shows them)"
        )
    dropped = _total(blind.get("dropped"))
    if dropped:
        lines.append(f"{dropped:,} events did not fit the ring (record with a larger --ring)")
    hooks = recording.coverage.get("hooks")
    for status in ("absent", "lost"):
        names = [n for n, h in _hooks(hooks) if h.get("status") == status]
        if names:
            lines.append(f"hooks {status}: {', '.join(sorted(names))}")
    replay = recording.coverage.get("replay")
    not_replayed = replay.get("not_replayed") if isinstance(replay, dict) else None
    for reason, count in not_replayed.items() if isinstance(not_replayed, dict) else []:
        lines.append(f"not replayed: {reason} ({count})")
    return lines


def _total(value: object) -> int:
    if isinstance(value, dict):
        return sum(_total(item) for item in value.values())
    return value if isinstance(value, int) else 0


def _hooks(hooks: object) -> list[tuple[str, dict[str, object]]]:
    if not isinstance(hooks, dict):
        return []
    return [(name, hook) for name, hook in hooks.items() if isinstance(hook, dict)]
