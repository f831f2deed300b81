"""Prints the positive list as the page `docs/sharing.md`, so that page and code agree."""

from __future__ import annotations

from padtrace.recording.absent import NOT_RECORDED
from padtrace.sharing import kept
from padtrace.sharing.kept import Kept, Kind
from padtrace.sharing.redact import REDACTED

_OPENING = f"""# What leaves the server

<!-- Written by `make docs` from padtrace/sharing/kept.py. A test holds them together. -->

A recording is made to be shown to strangers, so what it holds is a positive list, of
version {kept.LIST_VERSION}, applied inside the server, again when rings are sealed, and proven by

    padtrace info crash.safetensors --share-check

## The rule

- Columns are integers: row counts, lengths, sizes, ranks, times.
- Numbers, booleans, None and lists of these are kept, except under the name of a secret.
- A server argument that is one of the words which a tested release of SGLang lets one choose from
  is kept (`padtrace/sharing/server_arguments.json`). A word of a plugin, or of a release that came
  later, is not.
- Of every other text there is a row below. What has none is a name without its value:
  `"{NOT_RECORDED}"`, so that a reader can tell "set" from None.
- Objects, paths, URLs and JSON are never kept. Of a command line the flags are, and their values by
  the same rule.
- An error's message is kept if it fits a shipped template (`padtrace/sharing/messages.py`); of any
  other there is a hash.
- A machine is a number made of its name and the random id of its boot, which no recording holds.

Every text that remains goes through a second wall that knows secrets, people and places by their
shape: keys and tokens of services, `Authorization` headers, values under the name of a secret,
URLs, absolute paths, addresses. What it takes out becomes `"{REDACTED}"`. It cannot know a secret
that looks like a word; the list is the first wall for that reason.

## A file that holds more

`--share-check` walks every text of the file, names included, also entries that padtrace does not
know; it says where texts lie and fails (exit 1) on what a stranger should not read, with its place
and never the text. A file of an older padtrace holds more: all server arguments, names of machines,
variables. A copy that can be shared, with the same tables and so the same verdict, is made by

    padtrace redact old.safetensors -o shared.safetensors

It drops values of tensors (tiers `meta` and `full`), says in counts what it took out, and does not
overwrite unasked.

What padtrace prints on your terminal, ring files, and a file's own name are not recordings: look at
them yourself before you post them. A ring's name holds the name of its machine.
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join(
        [
            _OPENING,
            _section("Facts of a process", kept.FACTS),
            _section(
                "Environment variables",
                kept.ENVIRONMENT,
                "Of other variables that begin with `SGLANG_` or `SGL_` only the name is kept.",
            ),
            _section("What a file says of itself", kept.ABOUT),
        ]
    )


def _section(title: str, rows: tuple[Kept, ...], opening: str = "") -> str:
    lines = [f"## {title}", "", *([opening, ""] if opening else [])]
    lines += ["| place | what it must look like | why |", "| --- | --- | --- |"]
    lines += [f"| `{row.place}` | {_form(row)} | {row.reason} |" for row in rows]
    return "\n".join(lines) + "\n"


def _form(row: Kept) -> str:
    return ", ".join(f"`{word}`" for word in row.words) if row.kind is Kind.WORD else row.kind.value
