"""Recording without `padtrace record`: nodes with folders of their own, merged on the command line.

No run is named, as where somebody only sets PADTRACE_RECORD on each node.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from padtrace import cli
from padtrace.record import attach, ring_file, settings
from padtrace.record import ring_format as form
from padtrace.record.ring import EventWriter
from padtrace.record.seal import seal
from padtrace.recording.reader import read
from padtrace.sharing.rule import node_label
from tests.record.made_events import MadeRank, rank_facts

RANKS = 4
HOUR_NS = 3600 * 10**9
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line; gives (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "100")

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["padtrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return command


Record = Callable[..., Path]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Records the two ranks of one of two machines, whose clock is so many hours ahead."""

    def node(
        number: int, *, hours: float = 0, session: str = "1.1", run: str = "", folder: str = ""
    ) -> Path:
        where = tmp_path / (folder or f"node{number}")
        with monkeypatch.context() as patch:
            real = time.time_ns
            patch.setattr(ring_file.time, "time_ns", lambda: real() + int(hours * HOUR_NS))
            patch.setattr(ring_file.socket, "gethostname", lambda: f"node{number}")
            patch.setattr(ring_file, "boot_id", lambda: f"boot-of-node{number}")
            patch.setattr(ring_file, "session", lambda: session)
            for tp_rank in (2 * number, 2 * number + 1):
                writer = EventWriter.create(where, size_bytes=1 << 20, run=run)
                writer.facts(rank_facts(tp_rank=tp_rank, tp_size=RANKS))
                for _ in MadeRank(writer, dp_rank=number, attn_tp=2).forwards(3):
                    pass
                writer.close()
        return where

    return node


def skews(notes: list[str]) -> list[str]:
    return [note for note in notes if "clocks apart" in note]


@pytest.mark.parametrize("hours", [-24, -1, -0.5, 0.5, 1, 5.5])
def test_nodes_whose_clocks_are_apart_are_one_server_and_the_skew_is_told(
    record: Record, hours: float
) -> None:
    sealed = seal([record(0), record(1, hours=hours)])
    assert (sealed.missing_ranks, sealed.left_out) == ([], [])
    assert sealed.recording.table("process").column("global_rank").tolist() == [0, 1, 2, 3]
    (note,) = skews(sealed.recording.about["notes"])
    first, second = (node_label(f"node{number}", f"boot-of-node{number}") for number in (0, 1))
    assert "not aligned" in note
    (stated,) = re.findall(rf"{second} started ([+-]\d+) s from {first}", note)
    assert abs(int(stated) - hours * 3600) < 60


def test_nodes_whose_clocks_agree_have_no_skew(record: Record) -> None:
    sealed = seal([record(0), record(1, hours=0.1)])
    assert (len(sealed.rings), skews(sealed.notes)) == (4, [])


def test_a_named_run_is_one_whatever_the_clocks_say_and_the_skew_is_told(record: Record) -> None:
    sealed = seal([record(0, run="r"), record(1, run="r", hours=2)])
    assert (len(sealed.rings), len(skews(sealed.notes))) == (4, 1)


def test_runs_of_other_names_an_hour_apart_stay_apart(record: Record) -> None:
    sealed = seal([record(0, run="a"), record(1, run="b", hours=1)])
    assert (len(sealed.rings), len(sealed.left_out), skews(sealed.notes)) == (2, 2, [])


def test_an_earlier_run_of_the_other_node_is_not_taken_for_a_skewed_one(record: Record) -> None:
    record(0, hours=-5, session="old", folder="all")
    record(1, hours=-5, session="old", folder="all")
    sealed = seal([record(1, folder="all")])
    # Node 0 has only the earlier run, and that belongs to the earlier one of node 1.
    assert (len(sealed.rings), len(sealed.left_out), sealed.missing_ranks) == (2, 4, [0, 1])


def test_of_two_starts_the_nearer_one_is_taken(record: Record) -> None:
    record(0, hours=-30, session="old")
    sealed = seal([record(0, hours=-1, session="new"), record(1)])
    assert (len(sealed.rings), len(sealed.left_out), sealed.missing_ranks) == (4, 2, [])


def test_two_containers_of_one_machine_an_hour_apart_are_two_runs(
    record: Record,
) -> None:
    first = record(0)
    second = record(1, hours=1)
    for path in second.glob("*.ring"):
        data = path.read_bytes().replace(b"boot-of-node1", b"boot-of-node0", 1)
        fixed = data[: form.HEADER.size]
        path.write_bytes(fixed + form.CHECKSUM.pack(crc32(fixed)) + data[len(fixed) + 4 :])
    sealed = seal([first, second])
    assert (len(sealed.rings), len(sealed.left_out)) == (2, 2)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two machines with two ranks each; each with a clock and a boot of its own."""
    folders = tmp_path / "node0", tmp_path / "node1"
    for tp_rank in range(RANKS):
        host = f"node{tp_rank // 2}"
        monkeypatch.setattr(ring_file.socket, "gethostname", lambda host=host: host)
        monkeypatch.setattr(ring_file, "boot_id", lambda host=host: f"boot-of-{host}")
        arguments = {"enable_dp_attention": True, "node_rank": tp_rank // 2, "nnodes": 2}
        writer = EventWriter.create(folders[tp_rank // 2], size_bytes=1 << 20)
        facts = rank_facts(tp_rank=tp_rank, tp_size=RANKS, server_args=arguments)
        writer.facts(facts)
        for _ in MadeRank(writer, dp_rank=tp_rank // 2, attn_tp=2).forwards(3 + tp_rank):
            pass
        writer.close()
    return folders


def test_two_nodes_become_one_recording(run: Run, nodes: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "merged.safetensors"
    code, said, _ = run("seal", *nodes, "-o", out)
    assert code == 0
    assert "other ranks of the same server" in said
    assert "no ring of rank" not in said
    recording = read(out)
    table = recording.table("process")
    assert table.column("global_rank").tolist() == [0, 1, 2, 3]
    assert table.column("node").tolist() == [0, 0, 1, 1]
    process = recording.table("forward").column("process")
    assert [int((process == rank).sum()) for rank in range(RANKS)] == [3, 4, 5, 6]


def test_the_ranks_of_a_node_left_out_are_named(
    run: Run, nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "half.safetensors"
    code, said, _ = run("seal", nodes[1], "-o", out, "--json")
    assert code == 0
    answer = json.loads(said)
    assert answer["missing_ranks"] == [0, 1]
    assert "no ring of rank 0, 1" in answer["notes"]
    assert "ranks without a file: 0, 1" in run("info", out)[1]


def test_one_rank_without_a_file_is_named(
    run: Run, nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    lost = next(path for path in nodes[0].glob("*.ring") if b"node0" in path.read_bytes()[:1024])
    lost.unlink()
    code, said, _ = run("seal", *nodes, "-o", tmp_path / "three.safetensors", "--json")
    assert code == 0
    assert len(json.loads(said)["missing_ranks"]) == 1
    assert json.loads(said)["missing_ranks"][0] in (0, 1)


def test_rings_by_name_do_as_well_as_folders(
    run: Run, nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    rings = [path for node in nodes for path in sorted(node.glob("*.ring"))]
    out = tmp_path / "named.safetensors"
    assert run("seal", *rings, "-o", out)[0] == 0
    assert read(out).rows("process") == RANKS


@pytest.mark.parametrize("kind", attach.KINDS)
def test_the_lines_to_attach_use_variables_that_are_read(run: Run, kind: str) -> None:
    code, said, _ = run("record", "--attach-config", kind)
    assert code == 0
    named = set(re.findall(r"PADTRACE_\w+", said))
    # Nodes of one server find each other by the run, which must be the same for all.
    assert {settings.FOLDER, settings.RUN} <= named <= set(settings.VARIABLES)
    assert "padtrace seal" in said
    (size,) = set(re.findall(r"PADTRACE_RING(?:=|\n\s+value: )(\S+)", said))
    assert settings.parse_size(size) == settings.DEFAULT_RING_BYTES


def test_lines_for_what_nobody_knows_are_a_usage_error(run: Run) -> None:
    code, _, error = run("record", "--attach-config", "podman?")
    assert code == 2
    assert "docker, kubernetes, slurm" in error
