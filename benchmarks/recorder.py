"""What recording costs and how large a recording is; the last line is JSON.

    python benchmarks/recorder.py --sglang 0.5.18 [--rounds 30] [--live]

All variants run in one process, in rounds that take turns: no hooks, hooks that do nothing,
padtrace's hooks with a real ring, and (fewer times, it is slow) SGLang's own dumper. A cost is the
median time of a forward with hooks less the median without; `undisturbed` takes each batch's best
time over all rounds instead, which a busy machine changes little. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from dumping import DumperHooks
from hooking import Recording, Variants, empty_hooks
from measuring import interleave, median, note_load, spread
from scene import LAYERS, PARTS, Scene, Script, import_sglang
from sizes import sealed_sizes
from workload import Layout

from padtrace.record import native
from padtrace.record.ring_reader import read_header

_COST_LAYOUT = Layout(attn_dp=2, attn_tp=2)
_HOOKED = ("off", "empty", "padtrace")
_DUMPER = "dumper"
_DUMPER_ONCE = "dumper, launches once"

Times = dict[tuple[str, int], list[float]]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    # The made server has the bug of sglang#30296: the live alarm is on, its lines are not wanted.
    logging.getLogger("padtrace").setLevel(logging.CRITICAL)
    version = import_sglang(options.sglang)
    kind = "plain Python" if native.compiled is None else "compiled"
    print(f"SGLang {version}; recorder {kind}; {note_load()}")
    scene = Scene(version)
    with _temporary(options.folder) as folder:
        # Sizes first: their processes are forked while SGLang's functions are still its own.
        sizes = sealed_sizes(scene, folder, options.size_forwards, options.ranks)
        result = {**costs(scene, folder, options), **sizes}
    if options.live:
        from live import decode_step_times

        result["live"] = decode_step_times(options.sglang, options.live_rounds)
    result["load"] = note_load()
    print(json.dumps(result))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sglang", default="0.5.18", help="a release or a path")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pool", type=int, default=48, help="different batches in a round")
    parser.add_argument("--dumper-rounds", type=int, default=3)
    parser.add_argument("--size-forwards", type=int, default=1000, help="per rank")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 32])
    parser.add_argument("--folder", type=Path, help="where rings and dumps go; a temporary one")
    parser.add_argument("--live", action="store_true", help="also a live server's decode steps")
    parser.add_argument("--live-rounds", type=int, default=3)
    return parser.parse_args(arguments)


@contextlib.contextmanager
def _temporary(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="padtrace-bench-", dir=parent) as name:
        yield Path(name)


def costs(scene: Scene, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per forward and per launch of every variant."""
    with scene.rank(_COST_LAYOUT, 0, options.pool) as scripts:
        scene.cheapen()
        return _costs(scene, folder, scripts, options)


def _costs(
    scene: Scene, folder: Path, scripts: list[Script], options: argparse.Namespace
) -> dict[str, Any]:
    recording = Recording(folder / "rings", 64 << 20)
    dumper = DumperHooks(folder / "dump", set(recording.hooks))
    variants = Variants(recording.hooks)
    variants.install("empty", empty_hooks(recording.hooks))
    variants.install("padtrace", recording.hooks)
    variants.install(_DUMPER, dumper.hooks)
    bench = _Bench(scene, variants, dumper, scripts)
    bench.warm_up()
    before = _events(recording)
    interleave(options.rounds, _HOOKED, bench.run_pool)
    interleave(options.dumper_rounds, (_DUMPER, _DUMPER_ONCE), bench.run_few)
    events = (_events(recording) - before) / (2 * options.rounds * len(scripts))
    variants.arm("off")
    recording.writer.close()
    return bench.report(events)


def _events(recording: Recording) -> int:
    return read_header(recording.writer.path)[1]["events"]


class _Bench:
    """Drives forwards under one variant after another and keeps the times."""

    def __init__(
        self, scene: Scene, variants: Variants, dumper: DumperHooks, scripts: list[Script]
    ) -> None:
        self._scene = scene
        self._variants = variants
        self._dumper = dumper
        self._scripts = scripts
        self.times: Times = {}
        self.parts: dict[str, list[list[int]]] = {}

    def warm_up(self) -> None:
        for variant in _HOOKED:
            self.run_pool(variant)
        self.times.clear()
        self.parts.clear()

    def run_pool(self, variant: str) -> None:
        """Every batch of the pool once with its layers and once without any launch."""
        self._variants.arm(variant)
        self._run(variant, LAYERS, self._scripts)
        self._run(variant, 0, self._scripts)
        self._variants.arm("off")

    def run_few(self, variant: str) -> None:
        """A few batches, all with their layers: the dumper takes milliseconds each."""
        self._variants.arm(_DUMPER)
        self._dumper.every_launch = variant == _DUMPER
        self._run(variant, LAYERS, self._scripts[:12])
        self._variants.arm("off")

    def _run(self, variant: str, layers: int, scripts: list[Script]) -> None:
        times = self.times.setdefault((variant, layers), [])
        gc.collect()
        for script in scripts:
            stamps: list[int] = []
            self._scene.drive(script, stamps, layers)
            times.append((stamps[-1] - stamps[0]) / 1e3)
            if layers:
                steps = [after - at for at, after in itertools.pairwise(stamps)]
                self.parts.setdefault(variant, []).append(steps)

    def report(self, events: float) -> dict[str, Any]:
        """Print the tables; the figures for the last line."""
        off = {layers: median(self.times["off", layers]) for layers in (LAYERS, 0)}
        cost = {
            (variant, layers): median(times) - off[layers]
            for (variant, layers), times in self.times.items()
        }
        self._print(cost)
        whole, without = cost["padtrace", LAYERS], cost["padtrace", 0]
        best_whole, best = self._undisturbed(LAYERS), self._undisturbed(0)
        result = {
            "us_per_forward": without,
            "us_per_launch": (whole - without) / LAYERS,
            "us_per_event": without / (events - 1),
            "us_per_forward_with_launches": whole,
            "ratio_to_empty_hooks": whole / cost["empty", LAYERS],
            "ratio_to_empty_hooks_without_launches": without / cost["empty", 0],
            "empty_us_per_forward": cost["empty", 0],
            "empty_us_per_launch": (cost["empty", LAYERS] - cost["empty", 0]) / LAYERS,
            "dumper_ratio": cost[_DUMPER, LAYERS] / whole,
            "dumper_ratio_launches_once": cost[_DUMPER_ONCE, LAYERS] / whole,
            "dumper_us_per_forward": cost[_DUMPER, LAYERS],
            "events_per_forward": events,
            "compiled": native.compiled is not None,
            "us_per_forward_undisturbed": best["padtrace"],
            "us_per_launch_undisturbed": (best_whole["padtrace"] - best["padtrace"]) / LAYERS,
            "ratio_to_empty_hooks_undisturbed": best_whole["padtrace"] / best_whole["empty"],
        }
        return {name: round(value, 2) for name, value in result.items()}

    def _undisturbed(self, layers: int) -> dict[str, float]:
        """Cost per forward from the best time of each batch of the pool."""
        best: dict[str, float] = {}
        for variant in _HOOKED:
            times, pool = self.times[variant, layers], len(self._scripts)
            best[variant] = sum(min(times[batch::pool]) for batch in range(pool)) / pool
        return {variant: value - best["off"] for variant, value in best.items()}

    def _print(self, cost: dict[tuple[str, int], float]) -> None:
        print(
            f"\n{'us a forward':32}{'layers':>8}{'10 %':>10}{'median':>10}{'90 %':>10}{'cost':>10}"
        )
        for (variant, layers), times in self.times.items():
            low, middle, high = spread(times)
            line = f"{variant:32}{layers:10}{low:10.1f}{middle:10.1f}{high:10.1f}"
            print(f"{line}{cost[variant, layers]:10.1f}")
        print(f"\n{'us a part of it, median':32}" + "".join(f"{v:>10}" for v in _HOOKED))
        for index, part in enumerate(PARTS):
            values = [median(row[index] for row in self.parts[v]) / 1e3 for v in _HOOKED]
            print(f"{part:32}" + "".join(f"{value:10.1f}" for value in values))


if __name__ == "__main__":
    raise SystemExit(main())
