"""Facts: what is there, without secrets, and readable by the typed view."""

from __future__ import annotations

import enum
import functools
import json
import re
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from padtrace.record.facts_collector import (
    fingerprint,
    parallel_facts,
    plain,
    process_facts,
    runner_facts,
)
from padtrace.recording import facts as typed
from padtrace.sharing.kept import LIST_VERSION


@dataclass
class ServerArgs:
    api_key: str = "sk-abcdefghijklmnop"
    tp_size: int = 4
    enable_dp_attention: bool = True
    disaggregation_mode: str = "null"
    speculative_num_draft_tokens: int = 6
    speculative_num_steps: int = 5
    speculative_eagle_topk: int = 1
    node_rank: int = 0
    _private: int = 3
    nested: Any = field(default_factory=lambda: {"bs": (1, 2), "token": "x"})


def model_runner(**changes: Any) -> Any:
    backend = SimpleNamespace(get_cuda_graph_seq_len_fill_value=lambda: 1)
    values = {
        "is_draft_worker": False,
        "server_args": ServerArgs(),
        "attn_backend": backend,
        "device": "cpu",
        "page_size": 64,
        "model_config": SimpleNamespace(
            context_len=4096, hf_config=SimpleNamespace(architectures=["A"], index_topk=2048)
        ),
        "token_to_kv_pool": SimpleNamespace(kv_cache_dim=656, dtype="torch.float8_e4m3fn"),
        "req_to_token_pool": SimpleNamespace(req_to_token=SimpleNamespace(shape=(9, 4171))),
        "decode_cuda_graph_runner": SimpleNamespace(capture_bs=[1, 2, 4]),
    }
    return SimpleNamespace(**{**values, **changes})


def test_a_model_runner_gives_facts_the_view_can_read() -> None:
    facts = json.loads(json.dumps(runner_facts(model_runner())))
    view = typed.view(facts)
    target = view.workers["target"]
    assert (target.page_size, target.seq_len_fill_value, target.kv_cache_dim) == (64, 1, 656)
    assert (target.decode_graph_bs, target.prefill_graph_bs) == ([1, 2, 4], [])
    assert target.req_to_token_shape == [9, 4171]
    assert target.model_config == {"context_len": 4096, "architectures": ["A"], "index_topk": 2048}
    assert target.kv_cache_dtype == "torch.float8_e4m3fn"
    assert (target.speculative_num_draft_tokens, target.topk) == (6, 1)
    assert view.server_args["tp_size"] == 4
    assert view.server_args["nested"] == "[not recorded]"
    assert "_private" not in view.server_args
    assert facts["process"] == {"replica": 0, "role": "null"}


def test_secrets_do_not_leave() -> None:
    text = json.dumps(runner_facts(model_runner()))
    assert "sk-abcdefghijklmnop" not in text
    assert json.loads(text)["server_args"]["api_key"] == "[not recorded]"


def test_a_draft_runner_is_told_apart_and_little_is_enough() -> None:
    facts = runner_facts(SimpleNamespace(is_draft_worker=True))
    assert list(facts["workers"]) == ["draft"]
    assert facts["workers"]["draft"]["backend"] is None
    typed.view(facts)


def test_the_rank_of_a_plain_replica() -> None:
    args = ServerArgs(enable_dp_attention=False)
    facts = runner_facts(model_runner(server_args=args, ps=SimpleNamespace(dp_rank=2)))
    assert facts["process"]["replica"] == 2


def test_a_fill_value_that_raises_is_no_fact() -> None:
    def refuse() -> int:
        raise NotImplementedError

    backend = SimpleNamespace(get_cuda_graph_seq_len_fill_value=refuse)
    facts = runner_facts(model_runner(attn_backend=backend))
    assert facts["workers"]["target"]["seq_len_fill_value"] is None


def test_sizes_of_newer_and_of_older_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = ModuleType("sglang.srt.runtime_context")
    newer.get_parallel = lambda: SimpleNamespace(attn_tp_size=2, tp_size=4)  # type: ignore[attr-defined]
    older = ModuleType("sglang.srt.layers.dp_attention")
    older.get_attention_dp_rank = lambda: 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, newer.__name__, newer)
    monkeypatch.setitem(sys.modules, older.__name__, older)
    assert parallel_facts() == {"attn_tp_size": 2, "tp_size": 4, "attn_dp_rank": 1}


def test_the_environment_is_sglangs_only_and_by_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_CP_V2", "1")
    monkeypatch.setenv("SGLANG_TEST_API_KEY", "hf_abcdefghijkl")
    monkeypatch.setenv("HOME_OF_SOMEBODY", "x")
    environment = process_facts("shape")["environment"]
    assert environment["SGLANG_ENABLE_CP_V2"] == "1"
    assert environment["SGLANG_TEST_API_KEY"] == "[not recorded]"
    assert "HOME_OF_SOMEBODY" not in environment


def test_plain_values() -> None:
    class Color(enum.Enum):
        RED = object()

    class Level(enum.IntEnum):
        HIGH = 3

    class Word(enum.StrEnum):
        AUTO = "auto"

    assert plain((Level.HIGH, None, True, 1.5, {1})) == [3, None, True, 1.5, [1]]
    assert plain(Color.RED) == "RED"
    assert plain(Word.AUTO) == "auto"
    assert plain(SimpleNamespace(secret=1)) == "[not recorded]"
    assert plain({"a": 1}) == "[not recorded]"


def test_facts_say_by_which_list_and_name_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "stables-7.horse.example")
    facts = process_facts("shape")
    assert facts["recorder"] == {"tier": "shape", "list": LIST_VERSION}
    assert re.fullmatch(r"node-[0-9a-f]{8}", facts["host"])
    assert facts["host"] == process_facts("meta")["host"]
    assert "stables" not in json.dumps(facts)


def test_a_fingerprint_follows_the_source_and_not_the_name() -> None:
    def one() -> int:
        return 1

    first = fingerprint(one)
    other = fingerprint(lambda: 2)
    assert first is not None
    assert len(first) == 32
    assert first != other
    assert fingerprint(len) is None


def test_a_wrapper_of_somebody_else_changes_the_fingerprint() -> None:
    def counts(batch: list[int]) -> list[int]:
        return batch

    plain_hash = fingerprint(counts)

    @functools.wraps(counts)
    def patched(batch: list[int]) -> list[int]:
        return [count + 1 for count in counts(batch)]

    assert plain_hash is not None
    assert fingerprint(patched) not in (None, plain_hash)
    assert fingerprint(functools.lru_cache(counts)) == plain_hash
