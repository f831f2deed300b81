"""The shipped words of server arguments are those of the tested releases, no more and no less."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from padtrace.replay import releases
from padtrace.sharing import kept

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = Path(kept.__file__).with_name("server_arguments.json")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "server_arguments", ROOT / "scripts/server_arguments.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.release
def test_the_file_is_what_the_releases_say() -> None:
    missing = [version for version in releases.TESTED if releases.here(version) is None]
    if missing:
        pytest.skip(f"not here: padtrace releases fetch {' '.join(missing)}")
    made = script()
    packages = [Path(str(releases.here(version))) / "sglang" for version in releases.TESTED]
    assert made.as_text(made.server_arguments(packages)) == FILE.read_text()


def test_what_replay_and_the_contracts_read_is_in_it() -> None:
    known = kept.server_arguments()
    for family in ("dsa", "nsa"):
        for phase in ("prefill", "decode"):
            assert "flashmla_kv" in known.choices[f"{family}_{phase}_backend"]
        assert known.choices[f"{family}_prefill_cp_mode"] == {"in-seq-split", "round-robin-split"}
    assert known.choices["cp_strategy"] == {"zigzag", "interleave"}
    assert {"tp_size", "dp_size", "node_rank", "page_size"} <= known.numbers
    assert known.flags["model"] == "model_path"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"choices": 3, "numbers": 1, "flags": 2}'])
def test_without_the_file_less_is_kept_and_nothing_raises(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server_arguments.json").write_text(content)
    monkeypatch.setattr(kept, "__file__", str(tmp_path / "kept.py"))
    kept.server_arguments.cache_clear()
    try:
        assert kept.server_arguments() == kept.ServerArguments()
    finally:
        kept.server_arguments.cache_clear()


def test_the_script_reads_every_way_a_release_writes_choices(tmp_path: Path) -> None:
    (tmp_path / "srt").mkdir(parents=True)
    (tmp_path / "srt/server_args.py").write_text(
        'WORDS = ["a", "b"]\n'
        "class ServerArgs:\n"
        '    mode: Literal["x", "y"] = "x"\n'
        "    size: Optional[int] = None\n"
        "    path: str = ''\n"
        '    kind: A[str, Arg(help="h", choices=["auto"] + WORDS, aliases=["--sort"])] = "a"\n'
        'parser.add_argument("--old-kind", "--older", type=str, choices=[*WORDS, "c"])\n'
        'parser.add_argument("--count", type=int, default=3)\n'
    )
    assert json.loads(script().as_text(script().server_arguments([tmp_path]))) == {
        "choices": {"kind": ["a", "auto", "b"], "mode": ["x", "y"], "old_kind": ["a", "b", "c"]},
        "numbers": ["count", "size"],
        "flags": {"older": "old_kind", "sort": "kind"},
    }
