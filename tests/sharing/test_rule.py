"""The positive list on facts and command lines: what is kept, and that all else is a name only."""

from __future__ import annotations

import enum
import json
import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padtrace.recording.absent import NOT_RECORDED
from padtrace.sharing import kept
from padtrace.sharing.names import secret_name
from padtrace.sharing.redact import REDACTED, redact_text
from padtrace.sharing.rule import (
    kept_about,
    kept_arguments,
    kept_command,
    kept_facts,
    kept_texts,
    model_name,
    node_label,
)
from tests.sharing.shapes import HARMLESS, SECRETS, SURROUNDINGS, Secret

KEY = "correct-horse-7"  # no shape of a secret: only where it stands gives it away


def arguments(**values: Any) -> dict[str, Any]:
    found: dict[str, Any] = kept_facts({"server_args": values})["server_args"]
    return found


def test_numbers_and_words_one_can_choose_are_kept() -> None:
    given = {
        "tp_size": 8,
        "mem_fraction_static": 0.8,
        "enable_dp_attention": True,
        "chat_template": None,
        "cuda_graph_bs": [1, 2, 4],
        "gc_threshold": [[700, 10], [1, 2]],
        "attention_backend": "dsa",
        "dsa_prefill_backend": "flashmla_kv",
        "kv_cache_dtype": "fp8_e4m3",
        "disaggregation_mode": "null",
        "speculative_algorithm": "EAGLE",
        "model_path": "zai-org/GLM-5",
    }
    assert arguments(**given) == given


@pytest.mark.parametrize(
    "value",
    [
        KEY,
        "zai-org/GLM-5",
        "flashmla_kv",
        ["flashmla_kv", KEY],
        {"bs": [1, 2]},
        SimpleNamespace(secret=1),
        b"bytes",
        float("nan"),
        float("inf"),
        2**80,
        list(range(5000)),
        [[[[[1]]]]],
        enum.Enum("Color", "RED").RED,  # type: ignore[attr-defined]
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_a_name_without_its_value(value: Any) -> None:
    assert arguments(some_new_argument=value) == {"some_new_argument": NOT_RECORDED}


def test_a_word_is_kept_for_its_own_argument_only() -> None:
    assert arguments(attention_backend="flashmla_kv")["attention_backend"] == NOT_RECORDED
    assert arguments(served_model_name="dsa")["served_model_name"] == NOT_RECORDED
    assert arguments(attention_backend=KEY)["attention_backend"] == NOT_RECORDED


def test_what_was_set_is_told_from_none_and_from_empty() -> None:
    assert arguments(api_key=KEY, chat_template=None, host="") == {
        "api_key": NOT_RECORDED,
        "chat_template": None,
        "host": "",
    }


def test_a_number_under_the_name_of_a_secret_goes() -> None:
    assert arguments(watermark_key=7, api_key=[1, 2]) == {
        "watermark_key": NOT_RECORDED,
        "api_key": NOT_RECORDED,
    }


def test_no_number_of_a_tested_release_sounds_like_a_secret() -> None:
    known = kept.server_arguments()
    assert len(known.numbers) > 150
    assert [name for name in known.numbers if secret_name(name)] == []


def test_objects_stand_where_the_recorder_puts_them_and_nowhere_else() -> None:
    config = {"model_config": {"index_topk": 2048}}
    assert kept_facts({"workers": {"target": {**config, "more": {}}}}) == {
        "workers": {"target": {**config, "more": NOT_RECORDED}}
    }
    assert kept_facts({"surprise": {"a": 1}, "text": KEY, "n": 3}) == {
        "surprise": NOT_RECORDED,
        "text": NOT_RECORDED,
        "n": 3,
    }


def test_variables_are_switches_and_numbers_of_the_table() -> None:
    facts = kept_facts(
        {
            "environment": {
                "SGLANG_ENABLE_CP_V2": "true",
                "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "2048",
                "SGLANG_USE_AITER": KEY,
                "SGLANG_SOMETHING": "1",
            }
        }
    )
    assert facts["environment"] == {
        "SGLANG_ENABLE_CP_V2": "true",
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "2048",
        "SGLANG_USE_AITER": NOT_RECORDED,
        "SGLANG_SOMETHING": NOT_RECORDED,
    }


def test_a_machine_is_a_number() -> None:
    label = node_label("gpu-7", "0f1e2d3c")
    assert kept_facts({"host": label}) == {"host": label}
    assert label != node_label("gpu-8", "0f1e2d3c")
    assert label != node_label("gpu-7", "another boot")
    assert node_label("gpu-7", "") == "node"
    assert kept_facts({"host": "gpu-7"}) == {"host": NOT_RECORDED}


@pytest.mark.parametrize("surrounding", [*SURROUNDINGS, "/models/{}", "org/{}"])
@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret.text[:24])
def test_no_secret_comes_through_by_any_row(secret: Secret, surrounding: str) -> None:
    text = surrounding.format(secret.text)
    server = {row.place.split(".")[1]: text for row in kept.FACTS if row.place.startswith("server")}
    config = {row.place.split(".")[3]: text for row in kept.FACTS if "model_config" in row.place}
    facts = {
        "sglang": {"version": text, "commit": text},
        "host": text,
        "recorder": {"tier": text},
        "workers": {"target": {"backend": text, "kv_cache_dtype": text, "model_config": config}},
        "device": {"type": text},
        "process": {"role": text},
        "server_args": {**server, "attention_backend": text, "nested": {"api_key": text}},
        "environment": {row.place.split(".")[1]: text for row in kept.ENVIRONMENT},
        "fingerprints": {"sglang.f": text},
        "case": {"plan": text, "cases": [{"id": text, "batch": 0}]},
    }
    about = {row.place: text for row in kept.ABOUT} | {"notes": [text], "chain_texts": [[text]]}
    if re.fullmatch(r"[0-9a-f]{7,64}", text):
        # Where a hash is due nothing tells it from a key.
        facts["sglang"], facts["fingerprints"], about["of"] = {}, {}, ""
    coverage = {"hooks": {"h": {"note": text}}}
    for document in (kept_facts(facts), kept_about(about), kept_texts(coverage)):
        assert secret.core not in json.dumps(document, ensure_ascii=False)
    typed = shlex.quote(text)
    command = f"python -m sglang.launch_server --tp 8 --model-path x {typed} --device {typed}"
    assert secret.core not in kept_command(command)
    assert secret.core not in " ".join(kept_arguments(["--model-path", text]))


@pytest.mark.parametrize("harmless", HARMLESS)
def test_sentences_of_our_own_come_through(harmless: str) -> None:
    told = {"notes": [f"rank 3 saw {harmless}"]}
    assert kept_about(told) == told


def test_what_stands_under_a_secret_name_goes_whatever_it_is() -> None:
    given = {"credentials": {"user": KEY, "more": [KEY, 7, None]}, "fired": {"0": 3}}
    assert kept_texts(given) == {
        "credentials": {"user": REDACTED, "more": [REDACTED, REDACTED, None]},
        "fired": {"0": 3},
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--tp", "8"], ["--tp", "8"]),
        (["--tp-size=8", "--dp", "2"], ["--tp-size=8", "--dp", "2"]),
        (["--cuda-graph-bs", "1", "2"], ["--cuda-graph-bs", "1", "2"]),
        (["--attention-backend", "dsa"], ["--attention-backend", "dsa"]),
        (["--nsa-prefill-backend=flashmla_kv"], ["--nsa-prefill-backend=flashmla_kv"]),
        (["--enable-dp-attention"], ["--enable-dp-attention"]),
        (["--model", "/mnt/a/GLM-5"], ["--model", ".../GLM-5"]),
        (["--model-path=zai-org/GLM-5"], ["--model-path=zai-org/GLM-5"]),
        (["--api-key", KEY], ["--api-key", NOT_RECORDED]),
        (["--api-key=1234"], [f"--api-key={NOT_RECORDED}"]),
        # argparse takes the beginning of a name for the name.
        (["--api-k", "1234"], ["--api-k", NOT_RECORDED]),
        (["--lora-paths", "a=b", "c=d", "--tp", "2"], ["--lora-paths", NOT_RECORDED, "--tp", "2"]),
        (["--served-model-name", "12"], ["--served-model-name", NOT_RECORDED]),
        (["--chat-template", "a b"], ["--chat-template", NOT_RECORDED]),
        (["--json-model-override-args", "{}"], ["--json-model-override-args", NOT_RECORDED]),
        (["--tp", KEY], ["--tp", NOT_RECORDED]),
        ([KEY], [NOT_RECORDED]),
        (["--sk-proj-9aB8cD7eF6gH5iJ4"], [REDACTED]),
        (["--a b"], [REDACTED]),
    ],
)
def test_a_command_line_keeps_its_flags(given: list[str], expected: list[str]) -> None:
    assert kept_arguments(given) == expected
    assert kept_arguments(expected) == expected


def test_a_command_as_typed() -> None:
    kept_line = kept_command("python -m sglang.launch_server --tp 4 --host 10.0.0.1 extra")
    assert kept_line == f"python -m sglang.launch_server --tp 4 --host '{NOT_RECORDED}'"
    assert kept_command(kept_line) == kept_line
    assert kept_command("/home/horse/python -c 'x' --tp 2").startswith(f"'{NOT_RECORDED}'")
    assert kept_command("an open 'quote") == NOT_RECORDED


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/mnt/team/models/glm-5", ".../glm-5"),
        ("~/models/glm-5", ".../glm-5"),
        ("/mnt/hub/models--zai-org--GLM-5/snapshots/0123abc/", "zai-org/GLM-5"),
        ("zai-org/GLM-5", "zai-org/GLM-5"),
        ("glm-5", "glm-5"),
        ("./glm-5", ".../glm-5"),
        ("a/b/glm-5", ".../glm-5"),
        ("C:\\Users\\horse\\glm-5", ".../glm-5"),
        ("\\\\stables\\share\\glm-5", ".../glm-5"),
        ("s3://bucket/x/glm-5?X-Amz-Signature=horse", ".../glm-5"),
        (f"s3://user:{KEY}@bucket/x/glm-5", ".../glm-5"),
        ("https://models.example/glm-5", NOT_RECORDED),
        ("~horse", NOT_RECORDED),
        ("/home/horse", NOT_RECORDED),
        ("/glm-5", NOT_RECORDED),
        ("https://models.example", NOT_RECORDED),
        ("tell me about my horse", NOT_RECORDED),
        ("/models/hf_AbCdEfGhIjKlMn", REDACTED),
        ("", NOT_RECORDED),
    ],
)
def test_a_path_keeps_the_name_of_the_model(path: str, name: str) -> None:
    assert model_name(path) == name
    assert model_name(name) == name


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4)
    ),
    max_leaves=20,
)
_PLACES = sorted({row.place.split(".")[0] for row in kept.FACTS} | {"server_args", "environment"})


@given(st.dictionaries(st.sampled_from(_PLACES) | st.text(max_size=9), _JSON, max_size=5))
@settings(max_examples=200, deadline=None)
def test_it_takes_anything_and_twice_is_once(facts: dict[str, Any]) -> None:
    for rule in (kept_facts, kept_about, kept_texts):
        once = rule(facts)
        json.dumps(once, allow_nan=False)
        assert rule(once) == once


@given(st.lists(st.text(max_size=20) | st.sampled_from(["--tp", "--model", "8"]), max_size=8))
@settings(max_examples=200, deadline=None)
def test_any_command_line_twice_is_once(given: list[str]) -> None:
    once = kept_arguments(given)
    assert kept_arguments(once) == once


def test_every_row_has_its_reason_and_no_place_twice() -> None:
    rows = (*kept.FACTS, *kept.ENVIRONMENT)
    assert len({row.place for row in rows}) == len(rows)
    assert len({row.place for row in kept.ABOUT}) == len(kept.ABOUT)
    for row in (*rows, *kept.ABOUT):
        assert row.reason
        assert redact_text(row.reason) == row.reason
        assert bool(row.words) == (row.kind is kept.Kind.WORD)
