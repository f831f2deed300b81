"""The command line: exit codes, one-line errors, no traceback, a fast start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from padtrace import cli
from padtrace.recording.writer import write
from padtrace.replay import releases
from tests.contracts.builders import Server, agreeing, report_30296, report_34443

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs the command line; gives (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("PADTRACE_DEBUG", raising=False)

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["padtrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return command


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.safetensors"
    write(report_30296(), path)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.safetensors"
    write(agreeing(), path)
    return path


@pytest.mark.parametrize("command", ["check", "diff"])
def test_exit_codes_follow_the_verdict(run, bad: Path, good: Path, tmp_path: Path, command) -> None:
    empty = tmp_path / "empty.safetensors"
    write(Server(source="made").finish(), empty)
    assert run(command, good)[0] == 0
    assert run(command, bad)[0] == 1
    assert run(command, empty)[0] == 5
    assert run(command, tmp_path / "none")[0] == 3
    assert run(command, good, "--only", "PT999")[0] == 2


def test_the_diagnosis_comes_first(run, bad: Path) -> None:
    for command in ("check", "diff"):
        _, out, _ = run(command, bad)
        assert out.startswith("num_splits 7, needs 9: the FlashMLA metadata of DRAFT_EXTEND_V2")


def test_json_is_one_object(run, bad: Path) -> None:
    for command in ("check", "diff"):
        code, out, err = run(command, bad, "--json")
        value = json.loads(out)
        assert (code, err, value["verdict"]) == (1, "", "divergent")
        assert value["findings"][0]["contract"] == "PT101"


def test_only_takes_ids_in_any_form(run, bad: Path) -> None:
    _, out, _ = run("check", bad, "--only", "pt101,PT501", "--json")
    assert set(json.loads(out)["coverage"]["contracts"]) == {"PT101", "PT501"}


def test_strict_counts_what_is_declared_harmless(run, tmp_path: Path) -> None:
    path = tmp_path / "padded.safetensors"
    from tests.contracts.test_contracts import page_table

    recording = page_table(4)
    write(recording, path)
    assert run("check", path)[0] == 0
    assert run("check", path, "--strict")[0] == 1


def test_two_recordings_are_compared(run, bad: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    write(report_30296(16), other)
    assert run("diff", bad, bad)[0] == 0
    code, out, _ = run("diff", bad, other)
    assert code == 1
    assert out.startswith("they part at rank 0 step 1")
    code, out, _ = run("diff", bad, other, "--json")
    assert json.loads(out)["differences"][0]["left"] == 8


def test_an_error_is_a_few_lines_without_traceback(run, tmp_path: Path) -> None:
    code, out, err = run("info", tmp_path / "none.safetensors")
    assert (code, out) == (3, "")
    lines = err.splitlines()
    assert lines[0].startswith("padtrace: bad recording")
    assert len(lines) <= 3
    assert "Traceback" not in err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from padtrace.errors import BadRecordingError

    monkeypatch.setenv("PADTRACE_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["padtrace", "info", str(tmp_path / "none")])
    with pytest.raises(BadRecordingError):
        cli.main()


def test_a_bug_of_ours_is_one_line_too(run, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(cli, "_read", broken)
    code, _, err = run("info", good)
    assert code == cli.EXIT_INTERNAL
    assert "ZeroDivisionError" in err
    assert "Traceback" not in err


def test_ctrl_c_is_130(run, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_read", interrupted)
    assert run("info", good)[0] == 130


@pytest.mark.parametrize("arguments", [["nonsense"], ["check"], ["show", "x", "--step", "two"]])
def test_misuse_is_exit_code_2(run, arguments: list[str]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert err


def test_show_prints_lines_of_json(run, bad: Path) -> None:
    code, out, _ = run("show", bad, "--json", "--kind", "plan")
    assert code == 0
    (line,) = out.splitlines()
    assert json.loads(line)["num_splits.rows"] == 7


def test_show_refuses_what_does_not_exist(run, bad: Path) -> None:
    assert run("show", bad, "--rank", 7)[0] == 2
    assert run("show", bad, "--kind", "pads")[0] == 2


def test_make_writes_and_does_not_overwrite(run, tmp_path: Path) -> None:
    case, made = tmp_path / "case.json", tmp_path / "made.safetensors"
    case.write_text(
        '{"id": "30296", "input": {"forward_mode": "DRAFT_EXTEND_V2", "spec": "draft_extend",'
        '"width": 6, "attn_tp": 8, "attn_cp": 1, "attn_dp": 1, "dp_rank": 0, "cp_v2": false,'
        '"is_extend_in_batch": false, "bs": [1], "raw_counts": [1]}}'
    )
    assert run("make", case, "-o", made)[0] == 0
    code, _, err = run("make", case, "-o", made)
    assert code == 2
    assert "--force" in err
    assert run("make", case, "-o", made, "--force")[0] == 0
    code, out, _ = run("check", made)
    assert code == 5
    assert "padtrace replay" in out


def test_make_refuses_what_is_no_json(run, tmp_path: Path) -> None:
    case = tmp_path / "case.json"
    case.write_text("{")
    assert run("make", case, "-o", tmp_path / "x")[0] == 2
    assert run("make", tmp_path / "none", "-o", tmp_path / "x")[0] == 2


def test_replay_needs_to_know_the_release(run, tmp_path: Path) -> None:
    path = tmp_path / "made.safetensors"
    write(Server(source="made", release=None).finish(), path)
    code, out, err = run("replay", path)
    assert code == 2
    assert "--sglang" in err
    assert out.startswith("recorded:")


def test_explain_tells_one_or_lists_all(run) -> None:
    assert run("explain", "pt101")[1].startswith("PT101")
    code, out, _ = run("explain", "--json")
    assert code == 0
    assert "PT101" in [entry["id"] for entry in json.loads(out)]
    assert run("explain", "PT0")[0] == 2


def test_info_and_its_proof(run, tmp_path: Path) -> None:
    path = tmp_path / "cp.safetensors"
    write(report_34443(), path)
    _, out, _ = run("info", path)
    assert "SGLang 0.5.17" in out
    assert "attn_cp 8" in out
    assert json.loads(run("info", path, "--json")[1])["tier"] == "shape"
    assert run("info", path, "--share-check")[0] == 0


def test_ranks_shows_one_step_side_by_side(run) -> None:
    path = RECORDINGS / "healthy-dsa-eagle-attention-tp-2.safetensors"
    code, out, err = run("ranks", path, "--step", "165", "--json")
    forward = json.loads(out)["forwards"][0]
    # Two DP ranks of attention TP 2 with 2 and 3 tokens: the largest, made even, for both.
    assert [row["counts"] for row in forward["ranks"]] == [[2, 3]] * 4
    assert [row["real_rows"] for row in forward["ranks"]] == [2, 2, 3, 3]
    assert [row["padded_rows"] for row in forward["ranks"]] == [4] * 4
    assert [row["buffer_rows"] for row in forward["ranks"]] == [8] * 4
    assert (code, err, forward["disagree"]) == (0, "", [])
    out = run("ranks", path, "--step", "165")[1]
    assert "4 ranks, counts [2, 3]" in out
    assert max(map(len, out.splitlines())) <= 80
    code, _, err = run("ranks", path, "--step", "99999")
    assert code == 2
    assert "steps 97 to 165" in err


@pytest.mark.release
def test_across_names_the_release_that_mended_it(run) -> None:
    for version in ("0.5.17", "0.5.18"):
        if releases.here(version) is None:
            pytest.skip(f"SGLang {version} is not here: padtrace releases fetch {version}")
    path = RECORDINGS / "34443-verify-bs1-width6-cp8.safetensors"
    code, out, err = run("across", path, "--releases", "0.5.17,0.5.18")
    # sglang#34443: 6 rows of q; planned for 8, a multiple of CP, until the release that has it.
    assert out.startswith("first bad 0.5.17, first good after it 0.5.18")
    assert "num_splits 9, needs 7" in out
    assert (code, err) == (1, "")
    code, out, _ = run("across", path, "--releases", "0.5.18,0.5.17", "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (1, "divergent")
    assert (found["first_bad"], found["first_good"]) == ("0.5.17", "0.5.18")
    rows = {one["release"]: one["forwards"][0] for one in found["releases"]}
    assert {r: (row["q_rows"], row["num_splits"]) for r, row in rows.items()} == {
        "0.5.17": (6, 9),
        "0.5.18": (6, 7),
    }


def test_across_needs_a_release(run) -> None:
    path = RECORDINGS / "34443-verify-bs1-width6-cp8.safetensors"
    code, out, err = run("across", path, "--releases", "")
    assert (code, out) == (2, "")
    assert "no release is named" in err


@pytest.mark.parametrize("command", ["replay", "across"])
def test_help_says_that_sglang_is_executed(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["padtrace", command, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "This executes" in " ".join(capsys.readouterr().out.split())


def test_help_and_info_import_little(good: Path) -> None:
    script = (
        "import sys; from padtrace import cli\n"
        "sys.argv = ['padtrace', *sys.argv[1:]]\n"
        "try:\n    cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'torch', 'sglang', 'msgspec'} & sys.modules.keys()),"
        " file=sys.stderr)"
    )

    def imported(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
        )
        return done.stderr.splitlines()[-1]

    assert imported("--help") == "[]"
    assert imported("version") == "[]"
    assert imported("info", str(good)) == "['msgspec', 'numpy']"
