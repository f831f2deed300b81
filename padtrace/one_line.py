"""Text that is fit for one line of a terminal, whatever a file or a process put into it.

What a terminal obeys or does not show is written as an escape, as in source code: controls, line
and paragraph separators, marks that turn the direction of writing, and characters without a shape.
Nothing is left out, so that two different texts look different; a backslash stays what it is.
This file imports little, since the log lines of a recorded server go through it too.
"""

from __future__ import annotations

import re

ELLIPSIS = "..."
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# Unicode calls them letters, marks or symbols, and most fonts draw nothing.
_UNSEEN = frozenset(
    (
        *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0),
        *range(0x180B, 0x1810),
        *range(0xFE00, 0xFE10),
        *range(0xE0100, 0xE01F0),
    )
)
_PLAIN = re.compile(r"[ -~]*")
# In JSON the controls below blank are escaped by every encoder, and a surrogate by none.
_NOT_ASCII = re.compile(r"[^\x00-\x7e]+")


def is_plain(character: str) -> bool:
    """Whether a terminal shows this character and does nothing else with it."""
    return character.isprintable() and ord(character) not in _UNSEEN


def one_line(text: str, limit: int | None = None) -> str:
    """The text with everything escaped that is no plain character: `\\x1b`, `\\u202e`, `\\n`.

    Args:
        limit: characters of the result; what is longer is cut and ends with `...`.
    """
    shown = text if limit is None else text[: limit + 1]
    if not _PLAIN.fullmatch(shown):
        shown = "".join(c if is_plain(c) else _escaped(c) for c in shown)
    if limit is None or len(shown) <= limit:
        return shown
    return shown[: limit - len(ELLIPSIS)] + ELLIPSIS


def lines(text: str) -> str:
    """As `one_line`, but line feeds stay: for what was laid out already."""
    return "\n".join(one_line(part) for part in text.split("\n"))


def safe_json(text: str) -> str:
    """JSON that says the same with nothing in it that a terminal could obey.

    Outside of strings JSON has no such characters, and within them `\\uXXXX` stands for one.
    """
    return _NOT_ASCII.sub(lambda part: "".join(map(_in_json, part[0])), text)


def _escaped(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return _NAMED.get(character, f"\\x{number:02x}")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _in_json(character: str) -> str:
    if is_plain(character):
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
