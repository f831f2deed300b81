"""Applies the positive list to facts, to a command line and to what a file says about itself.

Applied twice it changes nothing, so the server, sealing, `padtrace redact` and the proof of a file
all use it. It runs in the server: it never raises, whatever it is given.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from padtrace.recording.absent import NOT_RECORDED
from padtrace.sharing import kept
from padtrace.sharing.kept import Kept, Kind
from padtrace.sharing.names import secret_name
from padtrace.sharing.redact import REDACTED, redact_keys, redact_text

Place = tuple[str, ...]

LONGEST_TEXT = 4096
LONGEST_LIST = 4096
_DEEPEST_LIST = 3
_DEEPEST = 24
_LARGEST = 2**63

_PATTERNS = {
    Kind.NAME: re.compile(r"[\w<][\w.:<>+-]{0,199}"),
    Kind.NAMES: re.compile(r"[\w<][\w.:<>+-]{0,199}"),
    Kind.PATTERN: re.compile(r"[A-Z*|-]{1,512}"),
    Kind.VERSION: re.compile(r"v?\d{1,6}(?:\.\w{1,20}){0,5}(?:[+-][\w.-]{1,60})?"),
    Kind.HASH: re.compile(r"[0-9a-f]{7,64}"),
    Kind.NODE: re.compile(r"node-(?:[0-9a-f]{8}|\d{1,4})|node"),
    Kind.SWITCH: re.compile(r"[+-]?\d{1,18}(?:\.\d{1,9})?|(?i:true|false|yes|no|on|off)"),
}
# Names are numbers of a list of paths too: `0.5.18`, `node-1-12.34`.
_KEY = re.compile(r"[\w<./-][\w.:<>/+ -]{0,199}")
_NUMBER = re.compile(r"[+-]?\d{1,18}(?:\.\d{1,9})?(?:[eE][+-]?\d{1,3})?")
_FLAG = re.compile(r"--[A-Za-z0-9][A-Za-z0-9._-]{0,80}")
_BEFORE_FLAGS = frozenset(
    ("python", "-m", "sglang.launch_server", "-P", "-I", NOT_RECORDED, REDACTED)
)
_HUB = re.compile(r"models--([\w.+-]{1,96}?)--([\w.+-]{1,96})(?:[/\\]|\Z)")
_MODEL = re.compile(r"(?:\.\.\./)?(?:[\w.+-]{1,128}/)?[\w.+-]{1,128}(?:@[\w.-]{1,64})?")
# Where models are kept under their names; any other URL may hold anything.
_STORES = frozenset(("s3", "gs", "hf"))
_HOMES = frozenset(("home", "users", "root"))
_ALL = "*"


def kept_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of one process, or a part of them, by the list; what is left out is named."""
    try:
        return _object(facts, (), _rows(), None)
    except Exception:
        # Nothing is better than a server that falls, or a value nobody looked at.
        return {}


def kept_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of itself, by the list."""
    rows = {row.place: row for row in kept.ABOUT}
    return {_key(name): _about_value(value, rows.get(name)) for name, value in about.items()}


def kept_texts(value: Any, depth: int = 0, secret: bool = False) -> Any:
    """Sentences of padtrace's own, wherever they stand in a JSON value; keys too.

    Args:
        secret: a name above says that this is a secret, whatever it looks like.
    """
    if depth > _DEEPEST:
        return NOT_RECORDED
    if isinstance(value, Mapping):
        return {
            _text_key(name): kept_texts(item, depth + 1, secret or secret_name(str(name)))
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [kept_texts(item, depth + 1, secret) for item in value]
    if secret and value is not None and not isinstance(value, bool) and value != "":
        return REDACTED
    if isinstance(value, str):
        return redact_text(value[:LONGEST_TEXT])
    return _number(value)


def kept_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a server: flags, and values by the list; `--x v` and `--x=v` alike."""
    result: list[str] = []
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            name = flag[2:].replace("-", "_")
            flag = _flag(flag)
            result.append(f"{flag}={_argument(name, value)}" if equals else flag)
        else:
            # A flag may take several values, so its name holds until the next flag; of a model
            # there is one, and what follows is no part of it.
            value = _argument(name, argument)
            name = "" if _is_row(name) else name
            if value != NOT_RECORDED or result[-1:] != [NOT_RECORDED]:
                result.append(value)
    return result


def kept_command(command: str) -> str:
    """The same for a whole command as a shell would read it."""
    try:
        words = shlex.split(command[: LONGEST_TEXT * 4])
    except ValueError:
        return NOT_RECORDED
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    before = [word if word in _BEFORE_FLAGS else NOT_RECORDED for word in words[:first]]
    return shlex.join([*before, *kept_arguments(words[first:])])


def node_label(host: str, boot: str) -> str:
    """A number for a machine: equal in all its processes, and nothing to guess a name from.

    Args:
        boot: the random id of this boot, which no recording holds; without one there is no label
            but `node`, since names of machines can be guessed.
    """
    if not boot:
        return "node"
    data = f"{host}\0{boot}".encode("utf-8", "replace")
    return f"node-{hashlib.blake2b(data, digest_size=4).hexdigest()}"


def model_name(text: str) -> str:
    """The name of a model out of its path, its URL or its place in the cache of Hugging Face."""
    if text in (REDACTED, NOT_RECORDED):
        return text
    text = text[:LONGEST_TEXT].strip()
    scheme, found, rest = text.partition("://")
    if found:
        if scheme not in _STORES:
            return NOT_RECORDED
        text = "/" + re.split(r"[?#]", rest)[0].rpartition("@")[2]
    if redact_keys(text) != text:
        return REDACTED
    if cached := _HUB.search(text):
        return _model(f"{cached[1]}/{cached[2]}")
    parts = [part for part in re.split(r"[/\\]+", text) if part]
    if not parts:
        return NOT_RECORDED
    relative = parts[0] == "..." or not (re.match(r"[/\\~.]|[A-Za-z]:", text) or len(parts) > 2)
    if relative:
        return _model("/".join(parts))
    # Not the name of a user, nor of a bucket or a machine alone.
    lone = len(parts) < 2 or (len(parts) == 2 and parts[0].lower() in _HOMES)
    if lone or parts[-1].startswith("~"):
        return NOT_RECORDED
    return _model(f".../{parts[-1]}")


def _model(name: str) -> str:
    if not _MODEL.fullmatch(name):
        return NOT_RECORDED
    bare = name.removeprefix(".../")
    return name if redact_text(bare) == bare else REDACTED


@cache
def _rows() -> dict[Place, Kept]:
    return {tuple(row.place.split(".")): row for row in (*kept.FACTS, *kept.ENVIRONMENT)}


def _object(
    value: Mapping[Any, Any], path: Place, rows: Mapping[Place, Kept], default: Kept | None
) -> dict[str, Any]:
    return {
        _key(name): _value(item, (*path, str(name)), rows, default) for name, item in value.items()
    }


def _value(value: Any, path: Place, rows: Mapping[Place, Kept], row: Kept | None) -> Any:
    row = _row(path, rows) or row
    if isinstance(value, Mapping):
        if _general(path) in kept.OBJECTS:
            return _object(value, path, rows, None)
        return NOT_RECORDED
    if isinstance(value, (list, tuple)):
        if path == ("case", "cases"):
            return [_value(item, path, rows, row) for item in value[:LONGEST_LIST]]
        return _list(value, path, row, 1)
    if isinstance(value, str):
        return _text(value, path, row)
    return _number(value, path)


def _list(value: Sequence[Any], path: Place, row: Kept | None, depth: int) -> Any:
    """Whole or not at all: a list with a hole would be read as another list."""
    if len(value) > LONGEST_LIST or depth > _DEEPEST_LIST:
        return NOT_RECORDED
    items: list[Any] = []
    for item in value:
        if isinstance(item, (list, tuple)):
            items.append(_list(item, path, row, depth + 1))
        elif isinstance(item, str):
            items.append(_text(item, path, row))
        else:
            items.append(_number(item, path))
    return NOT_RECORDED if NOT_RECORDED in items else items


def _text(value: str, path: Place, row: Kept | None) -> str:
    value = str.__str__(value)
    if value in ("", NOT_RECORDED, REDACTED):
        return value
    if row is not None:
        return _by_row(value, row)
    if path[:1] == ("server_args",) and value in _words(path[-1]):
        return value
    return NOT_RECORDED


def _by_row(value: str, row: Kept) -> str:
    if row.kind is Kind.MODEL:
        return model_name(value)
    if row.kind is Kind.COMMAND:
        return kept_command(value)
    if row.kind is Kind.TEXT:
        return redact_text(value[:LONGEST_TEXT])
    if row.kind is Kind.WORD:
        return value if value in row.words else NOT_RECORDED
    if not _PATTERNS[row.kind].fullmatch(value):
        return NOT_RECORDED
    # A hash looks random, and is due here.
    hashed = row.kind in (Kind.HASH, Kind.NODE) or redact_text(value) == value
    return value if hashed else REDACTED


def _about_value(value: Any, row: Kept | None) -> Any:
    if isinstance(value, str):
        if value in ("", NOT_RECORDED, REDACTED):
            return value
        return NOT_RECORDED if row is None else _by_row(value, row)
    if row is not None and row.kind is Kind.TEXT:
        return kept_texts(value)
    if isinstance(value, Mapping):
        # Such as the chains of a replay: numbers by name of a column.
        return {_text_key(name): _about_value(item, None) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_about_value(item, None) for item in value]
    return _number(value)


def _row(path: Place, rows: Mapping[Place, Kept]) -> Kept | None:
    return rows.get(path) or rows.get(_general(path)) or rows.get((*path[:-1], _ALL))


def _general(path: Place) -> Place:
    return (path[0], _ALL, *path[2:]) if path[:1] == ("workers",) and len(path) > 1 else path


def _number(value: Any, path: Place = ()) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < _LARGEST:
        # Elsewhere the recorder itself says what is asked for.
        if path[:1] == ("server_args",) and secret_name(path[-1]):
            return NOT_RECORDED
        return int(value) if isinstance(value, int) else float(value)
    return NOT_RECORDED


def _key(name: Any) -> str:
    text = str(name)
    return text if _KEY.fullmatch(text) and redact_text(text) == text else REDACTED


def _text_key(name: Any) -> str:
    return redact_text(str(name)[:LONGEST_TEXT])


def _words(name: str) -> frozenset[str]:
    return kept.server_arguments().choices.get(name, frozenset())


def _flag(flag: str) -> str:
    return flag if _FLAG.fullmatch(flag) and redact_text(flag) == flag else REDACTED


def _argument(name: str, value: str) -> str:
    """One value of the command line, by the argument it is for."""
    if value in ("", NOT_RECORDED, REDACTED) or not name or secret_name(name):
        return value if value in (NOT_RECORDED, REDACTED) else NOT_RECORDED
    known = kept.server_arguments()
    names = {name, known.flags.get(name, name)}
    for candidate in sorted(names):
        row = _rows().get(("server_args", candidate))
        if row is not None:
            return _by_row(value, row)
    if _NUMBER.fullmatch(value) and _takes(name, known.numbers, known.flags):
        return value
    if value.lower() in ("true", "false"):
        return value
    words = (known.choices[other] for other in _named(name, known.choices, known.flags))
    return value if any(value in of for of in words) else NOT_RECORDED


def _is_row(name: str) -> bool:
    return ("server_args", kept.server_arguments().flags.get(name, name)) in _rows()


def _takes(name: str, known: Iterable[str], flags: Mapping[str, str]) -> bool:
    return next(iter(_named(name, known, flags)), None) is not None


def _named(name: str, known: Iterable[str], flags: Mapping[str, str]) -> list[str]:
    """Arguments that a flag can mean: argparse takes the beginning of a name for the name."""
    alias = flags.get(name)
    return [other for other in known if other == alias or other.startswith(name)]
