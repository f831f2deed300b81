"""Takes out of a text what has the shape of something that a stranger should not read.

The second wall: what leaves a server is chosen by name first (`sharing.kept`), and every text that
remains goes through here. What is taken out becomes "[redacted]", so that a reader sees there was
something. In doubt it is taken out.

It runs in the server when an error is recorded, so it never raises and its time grows with the
length of the text and no faster: each pattern begins where no other try of it can begin, or is
bounded in length.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from itertools import pairwise

from padtrace.sharing.names import content_name, secret_name

REDACTED = "[redacted]"

_START = r"(?<![A-Za-z0-9])"
# Keys and tokens of services, by the form their makers gave them.
_SERVICE_SHAPES = (
    rf"{_START}(?:[sprw]k|rkcs)_(?:live|test)_[A-Za-z0-9]{{8,}}+",
    rf"{_START}whsec_[A-Za-z0-9+/=]{{16,}}+",
    rf"{_START}(?:hf|api_org)_[A-Za-z0-9]{{8,}}+",
    rf"{_START}gh[pousr]_[A-Za-z0-9]{{16,}}+",
    rf"{_START}github_pat_\w{{16,}}+",
    rf"{_START}gl(?:pat|ptt|dt|rt|cbt|soat|ft|imt|agent|oas|ffct)-[A-Za-z0-9_.-]{{8,}}+",
    rf"{_START}x(?:ox[a-z]|app)-[A-Za-z0-9-]{{8,}}+",
    rf"{_START}A(?:KIA|SIA|ROA|IDA|BIA|CCA)[A-Z0-9]{{12,}}+",
    rf"{_START}AIza[A-Za-z0-9_-]{{20,}}+",
    rf"{_START}ya29\.[A-Za-z0-9_-]{{8,}}+",
    rf"{_START}GOCSPX-[A-Za-z0-9_-]{{8,}}+",
    rf"{_START}nvapi-[A-Za-z0-9_-]{{8,}}+",
    rf"{_START}npm_[A-Za-z0-9]{{16,}}+",
    rf"{_START}pypi-[A-Za-z0-9_-]{{16,}}+",
    rf"{_START}dckr_(?:pat|oat)_[A-Za-z0-9_-]{{8,}}+",
    rf"{_START}do[opr]_v1_[a-f0-9]{{16,}}+",
    rf"{_START}shp(?:at|ca|pa|ss)_[A-Za-z0-9]{{8,}}+",
    rf"{_START}SG\.[A-Za-z0-9_-]{{8,64}}\.[A-Za-z0-9_-]{{8,}}+",
    rf"{_START}gl(?:sa|c)_[A-Za-z0-9+/=_]{{16,}}+",
    rf"{_START}hv[sbr]\.[A-Za-z0-9_-]{{16,}}+",
    rf"{_START}(?:gsk|r8|ntn|sqp|lin_api|dapi|secret)_?[A-Za-z0-9]{{24,}}+",
    rf"{_START}(?:pplx|xai|tskey|sl|key|fw|co|jina|tvly|lsv2_pt|lsv2_sk)[-_][A-Za-z0-9_-]{{24,}}+",
    rf"{_START}AGE-SECRET-KEY-[A-Z0-9]{{16,}}+",
    rf"{_START}(?:AC|SK)[a-f0-9]{{32}}(?![A-Za-z0-9])",
    rf"{_START}[a-f0-9]{{32}}-us\d{{1,2}}(?![A-Za-z0-9])",
    rf"{_START}\d{{8,10}}:[A-Za-z0-9_-]{{35}}(?![A-Za-z0-9_-])",
    r"(?<![A-Za-z0-9_-])[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6,7}\.[A-Za-z0-9_-]{27,}+",
    # A JSON web token; also without its signature.
    r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{4,}+\.[A-Za-z0-9_-]{4,}+(?:\.[A-Za-z0-9_-]*+)?",
    rf"{_START}(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\w{{1,20}})\s{{1,4}}AAAA[A-Za-z0-9+/=]*+",
    r"(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|outlook\.office\.com/webhook"
    r"|webhook\.office\.com|logic\.azure\.com)[^\s\"'<>]*+",
)
_SCHEMES = (
    r"(?i:(?<![A-Za-z0-9])bearer\s{1,4})[A-Za-z0-9._~+/=-]{8,}+",
    # Other schemes are English words too: what follows must look encoded.
    r"(?i:(?<![A-Za-z0-9])(?:basic|digest|negotiate|ntlm|token|apikey)\s{1,4})"
    r"(?=[A-Za-z0-9._~+/-]{0,200}(?:[0-9=]|[a-z][A-Z]))[A-Za-z0-9._~+/=-]{8,}+",
    r"(?i:(?<![A-Za-z0-9])(?:password|passwd|passphrase|passcode|api[ _-]?key|secret|token)"
    r"\s{1,4}(?:is|was)\s{1,4})[^\s]++",
)
_PLACES = (
    r"(?<![A-Za-z0-9_+])\+\d{1,3}(?:[ .()-]{1,2}\d{2,5}){2,5}(?![A-Za-z0-9])",
    # A URL names a machine, and may hold a user, a signature, a path.
    r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{1,30}+:(?://|\\/\\/)[^\s\"'<>`]*+",
    r"(?<![A-Za-z0-9+.-])file:/[^\s\"'<>`]*+",
    r"(?<![A-Za-z0-9+.%-])[A-Za-z0-9+.%_-]{1,64}+:[^\s@:/\"']{1,128}@[A-Za-z0-9.-]{1,253}+",
    # E-mail, and user@machine: as scp writes it.
    r"(?<![A-Za-z0-9+.%_-])[A-Za-z0-9+.%_-]{1,64}+@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}"
    r"(?![A-Za-z0-9-])",
    r"(?<![A-Za-z0-9+.%_-])[A-Za-z0-9+.%_-]{1,64}+@[A-Za-z0-9.-]{1,253}+:[~/A-Za-z][^\s\"']*+",
    # Windows: a folder of a path may have spaces, since a backslash ends it.
    r"(?<![A-Za-z0-9])[A-Za-z]:\\+(?:[^\\/:*?\"'<>|\r\n]{1,255}\\+)*+[^\s\\\"'<>|,;]*+",
    r"(?<![A-Za-z0-9])[A-Za-z]:/[^\s\"'<>|,;:]*+",
    r"(?<![\\A-Za-z0-9])\\{2,}[A-Za-z0-9._$-]+\\+[^\s\"'<>|,;]*+",
    r"(?<!/)//[A-Za-z0-9._-]{1,63}+/[^\s\"'<>|,;]*+",
    r"(?<![A-Za-z0-9_~])~(?:[A-Za-z_][A-Za-z0-9_.-]*+)?(?:/[^\s:\"'|<>,;]*+)?(?<=[^~])",
    # From the root of a disk. One name alone may be a fraction or a flag of grep.
    r"(?<![A-Za-z0-9_.~/\\\]])(?:/+[^\s/:\"'|<>,;=()\[\]{}]++){2,}+/?",
    r"(?<![A-Za-z0-9_/])-[A-Za-z]/[^\s/:\"'|<>,;]++/[^\s\"'|<>,;]*+",
    r"(?<![A-Za-z0-9_.~/\\-])/(?:home|Users|root|mnt|media|Volumes|srv|private)/"
    r"[^\s:\"'|<>,;]*+",
    r"(?<![A-Za-z0-9_./])\.{1,2}/[^\s:\"'|<>,;]++",
    r"(?<![A-Za-z0-9])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![A-Za-z0-9]|[:-][0-9A-Fa-f])",
    # Names inside a company's network; a digit or a dash tells them from Python's own.
    r"(?<![A-Za-z0-9_.-])(?=[A-Za-z0-9.]{0,200}[0-9-])(?:[A-Za-z0-9-]{1,63}\.){1,6}"
    r"(?:internal|local|corp|lan|intranet|localdomain|svc|home|private)(?![A-Za-z0-9_-])"
    r"(?::\d{1,5})?",
    r"(?<![A-Za-z0-9_.-])ip(?:-\d{1,3}){4}(?![0-9])",
    r"(?<![A-Za-z0-9_.-])localhost:\d{2,5}(?![0-9])",
    r"(?<![A-Za-z0-9_.-])(?=[A-Za-z]{0,62}[0-9-])[A-Za-z][A-Za-z0-9-]{1,62}+:\d{4,5}(?![0-9A-Za-z])",
    r"(?<![A-Za-z0-9])[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}(?![A-Za-z0-9])",
)
_KEY_SHAPES = tuple(re.compile(shape) for shape in (*_SERVICE_SHAPES, *_SCHEMES))
_PLACE_SHAPES = tuple(re.compile(shape) for shape in _PLACES)
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,60}-----.*?(?:-----END [A-Z0-9 ]{0,60}-----|\Z)", re.DOTALL
)
_SK = re.compile(rf"{_START}(?:sk|pk|rk)-[A-Za-z0-9_-]{{8,}}+")
_WORDS = re.compile(r"(?:[a-z]{1,12}|\d{1,3})(?:[-_](?:[a-z]{1,12}|\d{1,3}))*")
_HEADER = re.compile(
    r"(?i)(?<![A-Za-z0-9])((?:proxy-)?authorization|(?:set-)?cookie)([\"']?\s{0,4}[:=]\s{0,4})"
    r"[^\r\n]++"
)
_NAMED = re.compile(
    r"(?<![\w.-])([\w.-]++)(\\?[\"']?\s{0,8}(?:=>|:=|[:=]|%3[dDaA])\s{0,8})(?=[^\s])"
)
_FLAG = re.compile(r"(?<![\w-])(--?[A-Za-z][\w.-]*+)(\s{1,8})(?=[^\s-])")
_VALUE_END = re.compile(r"[\s\"'&;]|,(?=\s|[\w.-]{1,80}[\"']?[:=]|\Z)|[)\]}](?=[\s,;)\]}]|\Z)")
# A value that is gone already.
_WITHHELD = re.compile(r"[\"']?\[(?:redacted|not recorded)\](?=[\s\"',;)\]}]|\Z)")
_LINE_END = re.compile(r"[\r\n]|\Z")
_BRACKETS = re.compile(r"[\[\]{}()]")
_HOST_PORT = re.compile(
    r"(?<![A-Za-z0-9_./-])(?:[A-Za-z0-9-]{1,63}\.){1,8}([A-Za-z0-9-]{1,63}):\d{2,5}(?![0-9])"
)
_SOURCE_FILE = frozenset(
    (
        "py", "pyx", "pyi", "c", "cc", "cpp", "cu", "cuh", "h", "hpp", "rs", "js", "ts", "json",
        "md", "txt", "so", "log", "sh",
    )
)  # fmt: skip
_IPV4 = re.compile(
    r"(?<![\w.])(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})(?:[:/]\d{1,5})?(?!\.?\d)(?![A-Za-z_])"
)
_IPV6 = re.compile(r"(?<![A-Za-z0-9:.])\[?([0-9A-Fa-f:.]{3,45})(?:%\w{1,15})?\]?(?![A-Za-z0-9:])")
_WORD = re.compile(r"(?<![A-Za-z0-9+_=-])[A-Za-z0-9+_=-]{20,}+")
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/=_.-])[A-Za-z0-9+/]{32,}+={0,2}(?![A-Za-z0-9=_.-])")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH_BEFORE = re.compile(r"(?:blake2b|sha(?:1|256|512)?|md5|commit|revision)[:= @]{1,2}\Z")
_HASH = re.compile(r"[0-9a-f]{7,128}")
_MIN_RANDOM_CHARACTERS = 20
_MIN_ENTROPY_BITS = 3.5


def redact_text(text: str) -> str:
    """`text` without what has the shape of a secret, a place or a person."""
    text = redact_keys(text)
    text = _IPV6.sub(_if_address6, text)
    text = _IPV4.sub(_if_address4, text)
    for shape in _PLACE_SHAPES:
        text = shape.sub(REDACTED, text)
    text = _HOST_PORT.sub(_unless_source, text)
    text = _BASE64.sub(_if_base64, text)
    return _WORD.sub(_if_random, text)


def redact_keys(text: str) -> str:
    """`text` without keys, tokens and what stands under the name of a secret; places stay."""
    text = _PEM.sub(REDACTED, text)
    text = _HEADER.sub(rf"\1\2{REDACTED}", text)
    text = _redact_named(text)
    text = _SK.sub(_unless_words, text)
    for shape in _KEY_SHAPES:
        text = shape.sub(REDACTED, text)
    return text


def _redact_named(text: str) -> str:
    """Values after a name that says what they are: `pass=`, `"token": {...}`, `--api-key x`."""
    for pattern in (_NAMED, _FLAG):
        parts: list[str] = []
        reached = 0
        for match in pattern.finditer(text):
            if match.start() < reached or _WITHHELD.match(text, match.end()):
                continue
            name = match[1].rpartition(".")[2] or match[1]
            if secret_name(match[1]):
                # A phrase is of several words.
                phrase = "phrase" in name.lower()
                end = _value_end(text, match.end(), whole_line=phrase)
            elif content_name(name):
                end = _value_end(text, match.end(), whole_line=True)
            else:
                continue
            parts += [text[reached : match.end()], REDACTED]
            reached = end
        text = "".join([*parts, text[reached:]])
    return text


def _value_end(text: str, start: int, whole_line: bool = False) -> int:
    """Where the value that begins at `start` ends: its bracket, its quotation mark, its word."""
    if text.startswith(REDACTED, start):
        return start + len(REDACTED)
    first = text[start]
    if first in "{[(":
        return _bracket_end(text, start)
    if text.startswith(('\\"', "\\'"), start):
        end = text.find(text[start : start + 2], start + 2)
        return len(text) if end < 0 else end
    if first in "\"'":
        end = text.find(first, start + 1)
        while end > 0 and text[end - 1] == "\\":
            end = text.find(first, end + 1)
        return len(text) if end < 0 else end + 1
    found = (_LINE_END if whole_line else _VALUE_END).search(text, start)
    end = len(text) if found is None else found.start()
    return max(end, start + 1)


def _bracket_end(text: str, start: int) -> int:
    depth = 0
    for match in _BRACKETS.finditer(text, start):
        depth += 1 if match[0] in "[{(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _unless_words(match: re.Match[str]) -> str:
    """`sk-learn-contrib` is a name, `sk-` and anything else a key."""
    return match[0] if _WORDS.fullmatch(match[0]) else REDACTED


def _unless_source(match: re.Match[str]) -> str:
    """`dsa_backend.py:123` is a line of code, `db.example.org:5432` a machine."""
    return match[0] if match[1].lower() in _SOURCE_FILE else REDACTED


def _if_address4(match: re.Match[str]) -> str:
    return REDACTED if all(int(match[i]) < 256 for i in range(1, 5)) else match[0]


def _if_address6(match: re.Match[str]) -> str:
    inside = match[1].rstrip(".")
    if inside.count(":") < 2 or not inside.strip(":."):
        return match[0]
    try:
        ipaddress.IPv6Address(inside)
    except ValueError:
        return match[0]
    return REDACTED


def _if_base64(match: re.Match[str]) -> str:
    """Letters and digits that change their kind all the time, as no path of names does."""
    word = match[0].rstrip("=")
    if _HASH.fullmatch(word):
        return match[0]
    kinds = [_kind(character) for character in word if character not in "+/"]
    changes = sum(a != b for a, b in pairwise(kinds))
    random = len(set(kinds)) == 3 and changes >= 0.3 * len(kinds)
    return REDACTED if random else match[0]


def _kind(character: str) -> int:
    return 0 if character.isdigit() else 1 if character.isupper() else 2


def _if_random(match: re.Match[str]) -> str:
    word = match[0]
    if _COMMIT.fullmatch(word.rpartition("=")[2]):
        return word
    before = match.string[max(match.start() - 16, 0) : match.start()]
    if _HASH.fullmatch(word) and _HASH_BEFORE.search(before):
        return word
    return REDACTED if _looks_random(word) else word


def _looks_random(word: str) -> bool:
    """Long, of mixed classes and of high entropy per character: no English, no path, no model."""
    longest = max(len(run) for run in re.split(r"[_=-]", word))
    if longest < _MIN_RANDOM_CHARACTERS:
        return False
    digits = sum(character.isdigit() for character in word)
    if digits < 3 or digits > len(word) - 3:
        return False
    counts = Counter(word)
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in counts.values())
    return entropy >= min(_MIN_ENTROPY_BITS, math.log2(len(word)) * 0.72)
