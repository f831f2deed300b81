"""Secrets are taken out by name and by shape; what replay needs stays."""

from __future__ import annotations

import json

import pytest
from padtrace.record.redact import (
    REDACTED,
    redact_arguments,
    redact_facts,
    redact_text,
    redact_value,
)

KEY = "correct-horse-7"  # no shape of a secret: only its name gives it away


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", KEY],
        [f"--api-key={KEY}"],
        ["--admin-api-key", KEY],
        ["--ssl-keyfile-password", KEY],
        ["--hf-token", KEY],
        ["--json-model-override-args", json.dumps({"hub": {"access_token": KEY}})],
        ["--model-path", f"https://user:{KEY}@models.example/x"],
        ["--model-path", f"s3://bucket/x?X-Amz-Signature={KEY}&a=1"],
        ["--extra", f"user=me,password={KEY}"],
    ],
)
def test_by_name(arguments: list[str]) -> None:
    redacted = " ".join(redact_arguments(arguments))
    assert KEY not in redacted
    assert REDACTED in redacted
    assert redacted.startswith(arguments[0].partition("=")[0])


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcdefgh12345678",
        "hf_AbCdEfGhIjKlMnOpQr",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVP",
        "Bearer abcdefgh12345678",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "a8Fk29dLq0Zx7Vb3nM1pQw5T",
    ],
)
def test_by_shape(secret: str) -> None:
    assert redact_text(secret) == REDACTED
    assert secret not in json.dumps(redact_value({"labels": ["x", f"a {secret} b"]}))


# Model names and settings as they stand in public commands and in SGLang's own arguments.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_path", "deepseek-ai/DeepSeek-V3.2-Exp"),
        ("model_path", "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8"),
        ("model_path", "moonshot/kimi-k2-thinking-int4-20250910-final"),
        ("tokenizer_path", "meta-llama/Llama-3.1-8B-Instruct"),
        ("tokenizer_mode", "auto"),
        ("max_total_tokens", 4096),
        ("max_total_tokens", "4096"),
        ("speculative_num_draft_tokens", 6),
        ("skip_tokenizer_init", True),
        ("speculative_token_map", "thunlp/freq/freq_32768.pt"),
        ("swa_full_tokens_ratio", 0.8),
        ("num_key_value_heads", 8),
        ("revision", "0123456789abcdef0123456789abcdef01234567"),
        ("dist_init_addr", "tcp://10.0.0.1:5000"),
        ("attention_backend", "flashmla_kv"),
        ("architectures", ["DeepseekV32ForCausalLM"]),
        ("api_key", None),
        ("chat_template", None),
    ],
)
def test_what_is_no_secret_stays(name: str, value: object) -> None:
    assert redact_value(value, name) == value


def test_facts_keep_the_hashes_of_sources() -> None:
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    facts = redact_facts(
        {
            "fingerprints": {"a.b": digest},
            "server_args": {"api_key": KEY, "tp_size": 8},
            "environment": {"SGLANG_X": "1", "SGLANG_SECRET_THING": KEY},
        }
    )
    assert facts == {
        "fingerprints": {"a.b": digest},
        "server_args": {"api_key": REDACTED, "tp_size": 8},
        "environment": {"SGLANG_X": "1", "SGLANG_SECRET_THING": REDACTED},
    }


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/mnt/team/models/glm-5", ".../glm-5"),
        ("~/models/glm-5", ".../glm-5"),
        ("/mnt/hub/models--zai-org--GLM-5/snapshots/0123abc/", ".../zai-org/GLM-5"),
        ("--model-path=/mnt/models/glm-5 --tp=4", "--model-path=.../glm-5 --tp=4"),
        ("zai-org/GLM-5", "zai-org/GLM-5"),
        ("http://127.0.0.1:30000/v1/models", "http://127.0.0.1:30000/v1/models"),
        ("/tmp", "/tmp"),
    ],
)
def test_a_path_keeps_its_last_name_only(text: str, kept: str) -> None:
    assert redact_text(text) == kept
