"""The second wall: what has the shape of a secret goes, what only looks like one stays."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padtrace.record import targets
from padtrace.recording import schema
from padtrace.sharing.names import content_name, secret_name
from padtrace.sharing.redact import REDACTED, redact_text
from tests.sharing.shapes import HARMLESS, SECRETS, SURROUNDINGS, Secret

LONG = 64 << 10
# Beginnings of what the patterns look for, without the end that they wait for.
UNFINISHED = [
    "a", "A1b/", "eyJ", "eyJ-", "sk-", "a@", "a:a@", "ab:", "1.", "10.2.", "~a", "a=", "pass=",
    "pass={", "pass='", "pass='\\'", "pass=a,", "prompt:", "authorization:", "basic a", "--a ",
    "--token ", "-----BEGIN A-----", "-----BEGIN ", "http://", "c:\\", "c:\\a ", "\\\\a", "/a",
    "./", "../", "a1.local", "a-1.", "0f:", "::", "ip-1", "+1 22", "M", "%3d", "{", "\n", "é",
]  # fmt: skip


def test_there_are_as_many_as_promised() -> None:
    assert len({secret.text for secret in SECRETS}) >= 80
    assert len(set(HARMLESS)) >= 40


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret.text[:24])
def test_a_secret_goes(secret: Secret, surrounding: str) -> None:
    redacted = redact_text(surrounding.format(secret.text))
    assert secret.core not in redacted
    assert REDACTED in redacted


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("harmless", HARMLESS)
def test_what_looks_alike_stays(harmless: str, surrounding: str) -> None:
    text = surrounding.format(harmless)
    assert redact_text(text) == text


def test_what_padtrace_writes_itself_stays() -> None:
    columns = [column for table in schema.all_tables() for column in table.columns]
    told = [text for column in columns for text in (column.name, column.meaning, column.unit)]
    told += [table.meaning for table in schema.all_tables()]
    told += [text for target in targets.TARGETS for text in (target.hook, target.cost)]
    assert len(told) > 900
    assert [text for text in told if redact_text(text) != text] == []


@pytest.mark.parametrize("start", UNFINISHED)
def test_long_texts_are_gone_through_once(start: str) -> None:
    """64 KB of what makes a careless pattern begin anew at every character: minutes, not this."""
    text = (start * (LONG // len(start) + 1))[:LONG]
    assert isinstance(redact_text(text), str)
    assert "hunter2horse" not in redact_text(f"{text} pass=hunter2horse")


@given(st.text(alphabet=string.printable + "é​…\\", max_size=200))
@settings(max_examples=300, deadline=None)
def test_it_never_raises_and_twice_is_once(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once


@pytest.mark.parametrize(
    "name",
    ["--api-key", "apiKey", "SGLANG_HF_TOKEN", "ssl_keyfile_password", "db_pass", "pw", "userPwd",
     "x-sig", "authorization", "private_key", "webhook_url", "session_id", "watermark_key"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer_path", "max_total_tokens", "num_key_value_heads", "speculative_token_map",
     "enable_forward_pass_metrics", "bucket_time_to_first_token", "skip_tokenizer_init", "author",
     "req_to_token_shape", "qk_nope_head_dim", "page_size", "compass_size", "signal"],
)  # fmt: skip
def test_names_that_only_sound_like_it(name: str) -> None:
    assert not secret_name(name)


def test_names_of_what_was_asked() -> None:
    assert content_name("--prompt")
    assert content_name("input-ids")
    assert not content_name("context_length")
