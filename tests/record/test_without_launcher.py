"""Recording without `padtrace record`: nodes with folders of their own, merged on the command line.

No run is named, as where somebody only sets PADTRACE_RECORD on each node.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from padtrace import cli
from padtrace.record import attach, ring_file, settings
from padtrace.record.ring import EventWriter
from padtrace.recording.reader import read
from tests.record.made_events import MadeRank, rank_facts

RANKS = 4
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
