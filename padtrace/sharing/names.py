"""Names under which something lies that is nobody else's business."""

from __future__ import annotations

import re

_SECRET_NAME = re.compile(
    r"key|token|secret|passw|passphrase|pwd|credential|auth(?!or(?!i[sz]))|bearer|cookie|signature|private"
    r"|session_id|webhook|connection_?string",
    re.IGNORECASE,
)
# Too short to be looked for inside a longer word.
_SECRET_PARTS = frozenset(
    (
        "pass", "pw", "pwd", "passwd", "pat", "psk", "sig", "sas", "otp", "dsn", "jwt", "cred",
        "creds", "pin", "passcode",
    )
)  # fmt: skip
# Names of SGLang and of model configurations that only sound like a secret.
_HARMLESS_NAME = re.compile(
    r"tokenizer|tokens|token_(?:to|map|num|ids?|step|ratio|usage|usages|distribution)|num_token"
    r"|_per_token|(?:to|inter|first)_token|forward_pass|per_pass|key_value|num_key|qk_|KeyError"
    r"|disable_.*|enable_.*|skip_.*",
    re.IGNORECASE,
)
_CONTENT_NAME = re.compile(
    r"prompts?|system_prompt|user_prompt|negative_prompt|messages?_?content|content|messages"
    r"|chat_template|input_text|input_ids|output_ids|token_ids|completion",
    re.IGNORECASE,
)
_PART = re.compile(r"[A-Za-z][a-z]+|[A-Z]+(?![a-z])|[a-z]+")
_LONGEST = 256


def secret_name(name: str) -> bool:
    """Whether a value of this name is a secret; `--api-key`, `apiKey` and `API_KEY` alike."""
    plain = name[-_LONGEST:].lstrip("-").replace("-", "_")
    left = _HARMLESS_NAME.sub("", plain)
    if _SECRET_NAME.search(left):
        return True
    return any(part.lower() in _SECRET_PARTS for part in _PART.findall(left))


def content_name(name: str) -> bool:
    """Whether a value of this name is what somebody asked a model, or what it answered."""
    return _CONTENT_NAME.fullmatch(name.lstrip("-").replace("-", "_")) is not None
