"""How fast recordings are replayed and checked, and how soon the command line answers.

    python benchmarks/replay.py --sglang 0.5.18

The last line is JSON. See docs/performance.md for what is measured and what is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from measuring import interleave, median, note_load
from tile import tile
from workload import Layout, forwards

from padtrace.explore.make import make
from padtrace.recording.joining import join
from padtrace.recording.model import Recording
from padtrace.recording.writer import write
from padtrace.replay import service

_PADTRACE = [sys.executable, "-m", "padtrace"]
_ROOT = Path(__file__).resolve().parent.parent
_LAYOUT = Layout(attn_dp=4, attn_tp=2)
_REPLAYED_RANKS = 2


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    print(note_load())
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="padtrace-bench-", dir=options.folder) as name:
        folder = Path(name)
        small = folder / "small.safetensors"
        write(make([one.case for one in forwards(_LAYOUT, 0, 30)]), small)
        result.update(command_line(small, options))
        result.update(replay_rates(options))
        result.update(check_time(folder, options))
    result["load"] = note_load()
    print(json.dumps(result))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sglang", default="0.5.18", help="a release or a path")
    parser.add_argument("--forwards", type=int, default=6000, help="replayed a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of replays and checks")
    parser.add_argument("--starts", type=int, default=15, help="starts of the command line")
    parser.add_argument("--ranks", type=int, default=32, help="of the checked recording")
    parser.add_argument("--steps", type=int, default=10_000, help="of the checked recording")
    parser.add_argument("--distinct", type=int, default=100, help="steps that differ; then again")
    parser.add_argument("--folder", type=Path, help="for the recordings; a temporary one")
    return parser.parse_args(arguments)


# --- the command line -----------------------------------------------------------------------------

_EMPTY_APP = """
import typer
app = typer.Typer(add_completion=False)
@app.command()
def nothing() -> None:
    '''Do nothing.'''
app()
"""


def command_line(recording: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the start of a process to its end, or to its first line."""
    empty = recording.with_name("empty.py")
    empty.write_text(_EMPTY_APP)
    replay = ["replay", str(recording), "--sglang", options.sglang]
    commands = {
        "empty": [sys.executable, str(empty), "--help"],
        "help": [*_PADTRACE, "--help"],
        "info": [*_PADTRACE, "info", str(recording)],
        "first line": [*_PADTRACE, *replay],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}

    def start(name: str) -> None:
        measure = _until_first_line if name == "first line" else _until_end
        seconds[name].append(measure(commands[name]))

    for name in commands:  # once for the caches of the file system
        start(name)
        seconds[name].clear()
    interleave(options.starts, list(commands), start)
    print(f"\n{'seconds':32}{'best':>10}{'median':>10}")
    for name, times in seconds.items():
        print(f"{name:32}{min(times):10.3f}{median(times):10.3f}")
    base = median(seconds["empty"])
    return {
        "first_line_seconds": round(median(seconds["first line"]), 3),
        "help_ratio": round(median(seconds["help"]) / base, 2),
        "info_ratio": round(median(seconds["info"]) / base, 2),
        "empty_typer_seconds": round(base, 3),
    }


def _until_end(command: Sequence[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=_environment(), check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return seconds


def _until_first_line(command: Sequence[str]) -> float:
    """Seconds until a whole line has come through the pipe; the process is then ended."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
        process.terminate()
        process.stdout.read()
    if not line.strip():
        raise SystemExit(f"{' '.join(command)} printed nothing")
    return seconds


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_ROOT)}


# --- replay ---------------------------------------------------------------------------------------


def replay_rates(options: argparse.Namespace) -> dict[str, Any]:
    """Forwards a second through SGLang, in workers that have it imported.

    The time is the caller's: it holds packing the recording, the way to the workers and back,
    provenance, and joining what they give. Every forward of a rank has other lengths or counts than
    all before it, since equal inputs would be run once; the same without that is shown beside it,
    and so is one worker alone.
    """
    count = options.forwards // _REPLAYED_RANKS
    one = {
        "driven": [make(_distinct(count, rank)) for rank in range(_REPLAYED_RANKS)],
        "equal inputs": [make(_distinct(20, 0) * (count // 20))] * _REPLAYED_RANKS,
    }
    recordings = {name: join(parts) for name, parts in one.items()}
    variants = {name: (recording, None) for name, recording in recordings.items()}
    variants["driven, one worker"] = (recordings["driven"], 1)
    rates: dict[str, list[float]] = {name: [] for name in variants}

    def run(name: str) -> None:
        recording, jobs = variants[name]
        started = time.perf_counter()
        replayed = service.replay(recording, sglang=options.sglang, kernels="off", jobs=jobs)
        seconds = time.perf_counter() - started
        equal = replayed.coverage["replay"]["equal_inputs"]
        if name != "equal inputs" and equal:
            raise SystemExit(f"{equal} inputs of {name} were equal")
        driven = replayed.coverage["driven"]
        if driven["not_driven"]:
            raise SystemExit(f"of {name} were not driven: {driven['not_driven']}")
        rates[name].append(recording.rows("forward") / seconds)

    for name in variants:  # SGLang and its DSA backend are imported when first needed
        run(name)
        rates[name].clear()
    interleave(options.rounds, list(variants), run)
    service.close()
    print(f"\n{'forwards a second':32}{'best':>10}{'median':>10}")
    for name, values in rates.items():
        print(f"{name:32}{max(values):10.0f}{median(values):10.0f}")
    return {
        "forwards_per_second": round(median(rates["driven"])),
        "forwards_per_second_equal_inputs": round(median(rates["equal inputs"])),
        "forwards_per_second_one_worker": round(median(rates["driven, one worker"])),
        "forwards_per_second_best": round(max(rates["driven"])),
        "forwards_per_second_one_worker_best": round(max(rates["driven, one worker"])),
    }


def _distinct(count: int, rank: int) -> list[dict[str, Any]]:
    """Cases of one rank of a server, no two alike: each has its own lengths."""
    cases: dict[str, dict[str, Any]] = {}
    for one in forwards(_LAYOUT, rank, 2 * count):
        cases.setdefault(json.dumps(one.case), one.case)
        if len(cases) == count:
            break
    return list(cases.values())


# --- check ----------------------------------------------------------------------------------------


def check_time(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of `padtrace check` in a fresh process, on a long recording of many ranks.

    The recording comes from padtrace's own hooks in one process per rank; its steps are then
    repeated until there are enough.
    """
    seconds: dict[str, list[float]] = {"healthy": [], "divergent": []}
    busy: dict[str, list[float]] = {"healthy": [], "divergent": []}
    peaks: dict[str, float] = dict.fromkeys(seconds, 0.0)
    files: dict[str, Path] = {}
    for name, recording in _recorded(folder, options).items():
        long = tile(recording, max(1, options.steps // recording_steps(recording)))
        files[name] = folder / f"{name}.safetensors"
        size = write(long, files[name])
        rows = sum(table.rows for table in long.tables.values())
        steps = recording_steps(long)
        print(
            f"\n{name}: {steps} steps x {long.rows('process')} ranks,"
            f" {long.rows('forward'):,} forwards, {rows:,} rows, {size / 1e6:.0f} MB"
        )
        del long

    def run(name: str) -> None:
        time_taken, of_processor, peak = _check(files[name], int(name == "divergent"))
        seconds[name].append(time_taken)
        busy[name].append(of_processor)
        peaks[name] = max(peaks[name], peak)

    interleave(options.rounds, list(files), run)
    print(f"\n{'seconds of padtrace check':32}{'best':>10}{'median':>10}{'CPU':>10}{'peak MB':>10}")
    for name, times in seconds.items():
        line = f"{name:32}{min(times):10.2f}{median(times):10.2f}{median(busy[name]):10.2f}"
        print(f"{line}{peaks[name]:10.0f}")
    return {
        "check_seconds_10000x32": round(median(seconds["healthy"]), 2),
        "check_seconds_10000x32_divergent": round(median(seconds["divergent"]), 2),
        "check_cpu_seconds": round(median(busy["healthy"]), 2),
        "check_peak_mb": round(max(peaks.values())),
    }


def recording_steps(recording: Recording) -> int:
    """Forwards of one rank; here a step has one."""
    return recording.rows("forward") // recording.rows("process")


# Run by a process of its own: a child begins with the peak memory of the one it was forked from.
_WATCHED = """
import json, resource, subprocess, sys, time
started = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
seconds = time.perf_counter() - started
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]))
"""


def _check(path: Path, expected: int) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak memory (MB) of one check in a process of its own."""
    command = [sys.executable, "-c", _WATCHED, *_PADTRACE, "check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=True)
    code, seconds, of_processor, peak = json.loads(done.stdout)
    if code != expected:
        raise SystemExit(f"padtrace check {path} ended with {code}: {done.stderr}")
    return seconds, of_processor, peak


def _recorded(folder: Path, options: argparse.Namespace) -> dict[str, Recording]:
    """Two runs of a server: without EAGLE nothing is wrong; with it most plans fit no pad."""
    from scene import Scene, import_sglang
    from sizes import record_server

    from padtrace.record.seal import seal

    scene = Scene(import_sglang(options.sglang))
    layout = Layout(options.ranks, 1) if options.ranks % 4 else Layout(options.ranks // 4, 4)
    found: dict[str, Recording] = {}
    for name in ("healthy", "divergent"):
        rings = folder / f"rings-{name}"
        record_server(scene, layout, rings, options.distinct, eagle=name == "divergent")
        found[name] = seal([rings]).recording
    return found


if __name__ == "__main__":
    raise SystemExit(main())
