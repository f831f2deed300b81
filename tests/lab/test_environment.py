"""What a lab server is started with."""

import json
import socket
from pathlib import Path

import pytest

from padtrace.errors import EnvironmentMissingError, UsageError
from padtrace.lab.environment import (
    MODELS,
    SITE,
    LabModel,
    free_port,
    lab_environment,
    lab_server_arguments,
)


def sglang_folder(root: Path) -> Path:
    (root / "sglang" / "srt").mkdir(parents=True)
    return root


def test_path_is_sglang_then_site_and_nothing_of_the_caller(tmp_path: Path) -> None:
    root = sglang_folder(tmp_path / "wheel")
    environment = lab_environment({"PYTHONPATH": "mine:yours"}, sglang_root=root, ranks=1)
    assert environment["PYTHONPATH"].split(":") == [str(root), str(SITE)]
    assert environment["PYTHONSAFEPATH"] == "1"


def test_a_checkout_is_entered_at_its_python_folder(tmp_path: Path) -> None:
    sglang_folder(tmp_path / "checkout" / "python")
    environment = lab_environment({}, sglang_root=tmp_path / "checkout", ranks=1)
    assert environment["PYTHONPATH"].split(":") == [
        str(tmp_path / "checkout" / "python"),
        str(SITE),
    ]


def test_without_a_root_only_the_site_is_added() -> None:
    assert lab_environment({}, sglang_root=None, ranks=1)["PYTHONPATH"] == str(SITE)


def test_a_folder_without_sglang_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissingError, match=tmp_path.name):
        lab_environment({}, sglang_root=tmp_path, ranks=1)


def test_one_bound_core_per_rank_also_when_ranks_outnumber_cores() -> None:
    environment = lab_environment({}, sglang_root=None, ranks=5, cores=[4, 7])
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "4|7|4|7|4"


def test_no_ranks_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        lab_environment({}, sglang_root=None, ranks=0)


def test_the_counter_test_is_off_unless_asked_for() -> None:
    assert "PADTRACE_LAB_FIX_30642" not in lab_environment({}, sglang_root=None, ranks=1)
    asked = lab_environment({}, sglang_root=None, ranks=1, fix_30642=True)
    assert asked["PADTRACE_LAB_FIX_30642"] == "1"


def test_the_real_indexer_is_on_unless_declined() -> None:
    usual = lab_environment({}, sglang_root=None, ranks=1)
    assert usual["PADTRACE_LAB_REAL_INDEXER"] == "1"
    assert usual["SGLANG_DISABLE_DSA_INDEXER_FUSION"] == "1"
    stub = lab_environment({}, sglang_root=None, ranks=1, real_indexer=False)
    assert "PADTRACE_LAB_REAL_INDEXER" not in stub


def test_a_plugin_allow_list_lets_the_lab_in_and_none_stays_none() -> None:
    listed = lab_environment({"SGLANG_PLUGINS": "theirs"}, sglang_root=None, ranks=1)
    assert listed["SGLANG_PLUGINS"] == "theirs,padtrace_lab"
    assert "SGLANG_PLUGINS" not in lab_environment({}, sglang_root=None, ranks=1)


def test_bytecode_is_cached_and_the_base_environment_untouched() -> None:
    base = {"PYTHONDONTWRITEBYTECODE": "1", "SGLANG_ENABLE_CP_V2": "1"}
    environment = lab_environment(base, sglang_root=None, ranks=1)
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment["SGLANG_ENABLE_CP_V2"] == "1"
    assert base == {"PYTHONDONTWRITEBYTECODE": "1", "SGLANG_ENABLE_CP_V2": "1"}


@pytest.mark.parametrize(
    ("model", "architecture", "backend"),
    [("dsa", "DeepseekV32ForCausalLM", "dsa"), ("dense", "Qwen3ForCausalLM", "torch_native")],
)
def test_arguments_name_a_model_that_is_there(
    model: LabModel, architecture: str, backend: str
) -> None:
    arguments = lab_server_arguments(model, port=31000, tp=4, extra=["--dp=2"])
    folder = Path(arguments[0].removeprefix("--model-path="))
    assert folder.parent == MODELS
    assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]
    assert f"--attention-backend={backend}" in arguments
    assert {"--device=cpu", "--host=127.0.0.1", "--port=31000", "--tp=4"} <= set(arguments)
    assert arguments[-1] == "--dp=2"


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="dsa, dense"):
        lab_server_arguments("llama", port=1, tp=1)  # type: ignore[arg-type]


def test_the_ports_derived_from_a_free_one_are_free_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        # SGLang's data-parallel controller binds the port 13 above the server's.
        drawn = iter([taken - 13, 21000])
        monkeypatch.setattr("padtrace.lab.environment.random.randrange", lambda *_: next(drawn))
        assert free_port() != taken - 13


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
