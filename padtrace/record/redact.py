"""Takes secrets out of server arguments, environment variables and command lines.

By name (`--api-key`, `HF_TOKEN`, `ssl_keyfile_password`, ...) and by shape (keys of known services,
JSON web tokens, passwords in URLs, long strings that look random). What is taken out becomes
"[redacted]", so that a reader sees there was something; of an absolute path only the last name
stays. In doubt it is taken out: a recording is made to be shown to others.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"key|token|secret|passw|pwd|credential|auth(?!or)|bearer|cookie|signature|private|session_id",
    re.IGNORECASE,
)
# Names of SGLang and of model configurations that only sound like a secret.
_HARMLESS_NAME = re.compile(
    r"tokenizer|tokens|token_(?:map|num|ids?|step|ratio|usage|usages)|num_token|_per_token"
    r"|key_value|num_key|qk_|disable_.*|enable_.*|skip_.*",
    re.IGNORECASE,
)
_STRONG_NAME = re.compile(r"api_?key|secret|passw|credential|bearer|(?:access|private)_?key", re.I)
_HASH_NAME = re.compile(r"revision|commit|hash|sha|digest|fingerprint", re.IGNORECASE)

_SHAPES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{8,}",
        r"\bhf_[A-Za-z0-9]{8,}",
        r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}",
        r"\bgl(?:pat|ptt)-[A-Za-z0-9_-]{8,}",
        r"\bxox[abprs]-[A-Za-z0-9-]{8,}",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}",
        r"\bAIza[A-Za-z0-9_-]{20,}",
        r"\bnvapi-[A-Za-z0-9_-]{8,}",
        r"\beyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?",
        r"(?i:\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*",
    )
)
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_URL_QUERY = re.compile(r"([?&;]([\w.-]+)=)([^&;#\s]+)")
_INLINE = re.compile(r"""((?:^|[\s,;{"'])["']?([\w.-]+)["']?\s*[:=]\s*["']?)([^\s"',;}]+)""")
_WORD = re.compile(r"[A-Za-z0-9+_=-]{20,}")
# Where things lie on somebody's machine is nobody else's business; the last name may be the model.
_PATH = re.compile(r"""(?<![\w./:~-])~?(?:/[^\s/:,;"'=|]+)+/([^\s/:,;"'=|]+)""")
# The cache of Hugging Face keeps a model under .../models--org--name/snapshots/<hash>.
_HUB_PATH = re.compile(r"""[^\s"'=]*/models--([^/\s]+?)--([^/\s]+)/snapshots/[^/\s"']+/?""")
_MIN_RANDOM_CHARACTERS = 20
_MIN_ENTROPY_BITS = 3.5


def secret_name(name: str) -> bool:
    """Whether a value of this name is a secret."""
    plain = name.lstrip("-").replace("-", "_")
    if _STRONG_NAME.search(plain):
        return True
    return bool(_SECRET_NAME.search(_HARMLESS_NAME.sub("", plain)))


def redact_text(text: str, name: str = "") -> str:
    """`text` without what has the shape of a secret; wholly redacted if `name` says so."""
    if name and text and secret_name(name):
        return REDACTED
    for shape in _SHAPES:
        text = shape.sub(REDACTED, text)
    text = _URL_USER.sub(REDACTED, text)
    text = _URL_QUERY.sub(_by_name, text)
    text = _INLINE.sub(_by_name, text)
    text = _HUB_PATH.sub(r".../\1/\2", text)
    text = _PATH.sub(r".../\1", text)
    if _HASH_NAME.search(name):
        return text
    return _WORD.sub(lambda match: REDACTED if _looks_random(match[0]) else match[0], text)


def redact_value(value: Any, name: str = "") -> Any:
    """The same for any JSON value; numbers, booleans and None are kept unless named a secret."""
    if isinstance(value, Mapping):
        return {str(key): redact_value(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_value(item, name) for item in value]
    if isinstance(value, str):
        return _redact_json(value, name)
    if isinstance(value, int) and not isinstance(value, bool) and _STRONG_NAME.search(name):
        return REDACTED
    return value


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets; `--name value` and `--name=value` alike."""
    result: list[str] = []
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            result.append(f"{name}={_redact_json(value, name)}" if equals else name)
            name = "" if equals else name
        else:
            # A flag may take several values, so its name holds until the next flag.
            result.append(_redact_json(argument, name))
    return result


def redact_facts(patch: Mapping[str, Any]) -> dict[str, Any]:
    """A patch of process facts, secrets out; hashes of sources are kept as they are."""
    return {
        key: value if key == "fingerprints" else redact_value(value, key)
        for key, value in patch.items()
    }


def _redact_json(text: str, name: str) -> str:
    """Values such as --json-model-override-args carry names of their own."""
    if not (name and secret_name(name)) and text[:1] in "{[":
        try:
            parsed = json.loads(text)
        except ValueError:
            return redact_text(text, name)
        if isinstance(parsed, (dict, list)):
            return json.dumps(redact_value(parsed, name))
    return redact_text(text, name)


def _by_name(match: re.Match[str]) -> str:
    return match[1] + (REDACTED if secret_name(match[2]) else match[3])


def _looks_random(word: str) -> bool:
    """Long, of mixed classes and of high entropy per character: no English, no path, no model."""
    if len(word) < _MIN_RANDOM_CHARACTERS:
        return False
    longest = max(len(run) for run in re.split(r"[_=-]", word))
    if longest < _MIN_RANDOM_CHARACTERS:
        return False
    digits = sum(character.isdigit() for character in word)
    if digits < 3 or digits > len(word) - 3:
        return False
    counts = Counter(word)
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in counts.values())
    return entropy >= min(_MIN_ENTROPY_BITS, math.log2(len(word)) * 0.72)
