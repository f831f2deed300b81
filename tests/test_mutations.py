"""Every refusal is typed: shipped recordings changed at random never end but in words.

Digests are made right again, so a change gets past them and meets the code behind. The seeds are
the names of the files and the numbers 0, 1, 2 ...; see `tests/mutations.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from padtrace.one_line import is_plain
from tests.mutations import ALLOWED, FOLDER, MEMORY_BYTES, NAMES, ROOT, Opened, mutated
from tests.test_recordings import FILES

ALL = 20_000
CHUNK = 500
# Small files take a tenth of the time of a live one.
SAMPLE = {name: 100 if name[0].isdigit() else 30 for name in NAMES}
COMMANDS = (
    *(["info"], ["check"], ["diff"], ["show"], ["ranks"], ["info", "--share-check"]),
    *(["check", "--json"], ["show", "--json"], ["ranks", "--json"]),
    ["diff", str(FOLDER / "crash.safetensors")],
)


def _drive(name: str, first: int, count: int) -> dict[str, int]:
    """Run some mutations in a process of their own, under a memory limit."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutations", name, str(first), str(count)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["failures"] == [], json.dumps(told["failures"], indent=1)
    codes: dict[str, int] = told["codes"]
    assert sum(codes.values()) == count
    return codes


def test_the_mutations_are_of_the_shipped_files() -> None:
    assert {path.stem for path in FILES} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_taken_apart_and_sealed_again_is_read(name: str) -> None:
    """Otherwise every mutation would be refused for its digests, and nothing be shown."""
    from padtrace.recording.reader import from_bytes, read

    path = FOLDER / f"{name}.safetensors"
    again = from_bytes(Opened.of(path.read_bytes()).sealed(), "again")
    assert list(again.events()) == list(read(path).events())


@pytest.mark.parametrize("name", NAMES)
def test_a_mutation_is_refused_or_judged(name: str) -> None:
    codes = _drive(name, 0, SAMPLE[name])
    # Both happen, or the mutations would be too harmless or too crude to show anything.
    assert len(codes) >= 2
    assert codes["3"] >= 5


@pytest.mark.hours
@pytest.mark.parametrize("first", range(0, ALL, CHUNK))
@pytest.mark.parametrize("name", NAMES)
def test_all_mutations(name: str, first: int) -> None:
    _drive(name, first, CHUNK)


def _run(tmp_path: Path, name: str, number: int, command: list[str]) -> None:
    data, recipe = mutated(name, number)
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(data)
    limit = f'ulimit -v {MEMORY_BYTES >> 10}; exec "$@"'
    verb, *more = command
    done = subprocess.run(
        ["bash", "-c", limit, "-", sys.executable, "-m", "padtrace", verb, str(path), *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    case = f"{name} {number} {recipe} {command}: {done.stderr}"
    assert done.returncode in ALLOWED, case
    assert all(c == "\n" or is_plain(c) for c in done.stdout + done.stderr), case
    assert len(done.stderr.splitlines()) <= 3, case
    if done.returncode == 3:
        assert done.stdout == "", case
        assert done.stderr.startswith("padtrace: bad recording: "), case


@pytest.mark.parametrize("index", range(14))
def test_a_mutation_through_the_commands(tmp_path: Path, index: int) -> None:
    _run(tmp_path, NAMES[index % 7], index, COMMANDS[index % len(COMMANDS)])


@pytest.mark.slow
@pytest.mark.parametrize("index", range(500))
def test_500_mutations_through_the_commands(tmp_path: Path, index: int) -> None:
    _run(tmp_path, NAMES[index % 7], index, COMMANDS[index % len(COMMANDS)])
