"""`padtrace info --share-check`: what a file can hold, and what in it a stranger should not read.

Three looks: every text of the file by shape, the whole recording against the positive list, and
every tensor against what its tier may hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from padtrace.errors import BadRecordingError
from padtrace.recording import schema
from padtrace.recording.absent import NOT_RECORDED
from padtrace.recording.columns import ENCODINGS
from padtrace.recording.model import Recording
from padtrace.recording.reader import MAX_HEADER_BYTES
from padtrace.recording.value_tensors import INTEGERS, PREFIX, tier_of
from padtrace.recording.writer import to_bytes
from padtrace.sharing import document, walk
from padtrace.sharing.kept import FACTS, LIST_VERSION, Kind
from padtrace.sharing.messages import kind_of_string
from padtrace.sharing.redact import REDACTED, redact_text
from padtrace.sharing.walk import Text

MOST_SUSPICIONS = 20
_LONGEST_NAME = 80
_MODELS = frozenset(row.place.rpartition(".")[2] for row in FACTS if row.kind is Kind.MODEL)
# Most texts of a file stand in every file: the meaning of its columns.
_LONGEST_REMEMBERED = 256
_LONGEST_TEXT = 1 << 16
_DIGEST_CHARACTERS = frozenset("0123456789abcdef")
# Words that only a column of contents would carry; no column of the schema does.
_CONTENT_WORDS = ("token_ids", "text", "prompt", "logits.values", "rid")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A text that a stranger should not read.

    Attributes:
        place: where it lies; `*` for the number of a process or of an item.
        masked: its first and last characters and its length; never the text.
        why: what is wrong with it.
        count: how often it lies there.
    """

    place: str
    masked: str
    why: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class ShareProof:
    """What was looked at to say what a file can hold.

    Attributes:
        tier: what the file says of itself.
        lines: what was looked at, with counts.
        free_texts: where texts lie that are no names, with counts.
        problems: why the file should not be shared as it is; empty if it can be.
        suspicions: single texts that should not be read, the first of them.
        holds_more: what an older or newer padtrace recorded beyond today's list, with counts.
        list_version: of the list the file was made by; None from before there was one.
    """

    tier: str
    lines: list[str]
    free_texts: dict[str, int]
    problems: list[str]
    suspicions: list[Suspicion] = field(default_factory=list)
    holds_more: dict[str, int] = field(default_factory=dict)
    list_version: int | None = None

    @property
    def holds(self) -> bool:
        return not (self.problems or self.suspicions or self.holds_more)

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "holds": self.holds,
            "looked_at": self.lines,
            "free_texts": self.free_texts,
            "problems": self.problems,
            "suspicions": [
                {"place": one.place, "text": one.masked, "why": one.why, "count": one.count}
                for one in self.suspicions
            ],
            "holds_more": self.holds_more,
            "list": {"of_file": self.list_version, "today": LIST_VERSION},
        }


def share_check_file(recording: Recording, path: Path) -> ShareProof:
    """The same for a file that the reader has just read: its header, byte by byte.

    Raises:
        BadRecordingError: the header cannot be read again, or is nested too deep.
    """
    try:
        with path.open("rb") as file:
            length = file.read(8)
            size = min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)
            return share_check(recording, length + file.read(size))
    except (OSError, ValueError, RecursionError) as error:
        raise BadRecordingError(
            f"bad recording: {path.name}",
            f"its header cannot be looked through: {type(error).__name__}",
            "ask for the file again, or record once more",
        ) from error


def share_check(recording: Recording, data: bytes | None = None) -> ShareProof:
    """Look at everything in the file that could carry contents.

    Args:
        recording: as the reader gave it, so columns are integers and values of known fields.
        data: the file itself; without it, the file as it would be written.
    """
    header = _header(to_bytes(recording) if data is None else data)
    tier = str(recording.about.get("tier", "unknown"))
    columns = [column for table in schema.all_tables() for column in table.columns]
    problems: list[str] = []
    if tier != "shape":
        what = f"the file says it is of tier {masked(tier)}"
        if tier in ("meta", "full"):
            what = f"the file says it is of tier {tier}"
        problems.append(f"{what}, which holds values, not only shapes")
    contents = [c.name for c in columns if any(word in c.name for word in _CONTENT_WORDS)]
    problems += [f"column {name} could hold contents" for name in contents]
    problems += _forbidden_values(recording, tier)
    problems += _unknown_parts(header)
    suspicions = _suspicions(header)
    if len(suspicions) > MOST_SUSPICIONS:
        problems.append(f"{len(suspicions) - MOST_SUSPICIONS} more texts that look like secrets")
    kinds = Counter(kind_of_string(text) for text in recording.strings)
    lines = [
        f"{len(columns)} columns, all integers: row counts, lengths, sizes, ranks, times, names",
        f"{len(recording.strings)} strings: {_counts(dict(kinds)) or 'none'}",
        f"{recording.rows('vector')} lists of integers: per-rank counts, lengths, shapes",
        f"{recording.rows('error')} errors: each message a shipped template or a hash",
        f"facts of {len(recording.facts)} ranks: numbers, and texts by list {LIST_VERSION}",
        _values(recording),
    ]
    return ShareProof(
        tier,
        lines,
        _free_texts(header),
        problems,
        suspicions[:MOST_SUSPICIONS],
        _holds_more(recording),
        _list_version(recording),
    )


def masked(text: str) -> str:
    """The first and the last character and the length of a text, escaped."""
    if len(text) < 8:
        return f"… ({len(text)} characters)"
    ends = [character if character.isprintable() else "?" for character in (text[0], text[-1])]
    return f"{ends[0]}…{ends[1]} ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of a file, taken apart."""

    raw: Any
    entries: list[tuple[str, Any]]


def _header(data: bytes) -> _Header:
    size = int.from_bytes(data[:8], "little")
    raw = walk.parsed(data[8 : 8 + size])
    entries: list[tuple[str, Any]] = []
    for name, value in raw:
        if name == walk.METADATA and isinstance(value, walk.Pairs):
            entries += [(key, _entry(key, text)) for key, text in value]
    return _Header(raw, entries)


def _entry(name: str, text: Any) -> Any:
    if name in walk.JSON_ENTRIES and isinstance(text, str):
        try:
            return walk.parsed(text)
        except (ValueError, RecursionError):
            # The reader knows better; as a text it is looked at all the same.
            return text
    return text


def _texts(header: _Header) -> Iterator[Text]:
    for name, value in header.raw:
        if name != walk.METADATA:
            yield Text(("tensors",), name, True)
            yield from walk.texts_of(value, ("tensors", name))
    for name, value in header.entries:
        yield Text((), name, True)
        yield from walk.texts_of(value, (name,))


def _suspicions(header: _Header) -> list[Suspicion]:
    found: Counter[tuple[str, str, str]] = Counter()
    for text in _texts(header):
        if _is_digest(text) or _passes(text.text):
            continue
        why = "a name that looks like a secret" if text.is_name else "looks like a secret"
        found[_shown(text.place), masked(text.text), why] += 1
    return [Suspicion(*what, count) for what, count in sorted(found.items())]


def _passes(text: str) -> bool:
    if len(text) <= _LONGEST_REMEMBERED:
        return _passes_remembered(text)
    # Nothing that padtrace writes is as long as that, and looking takes its time.
    return len(text) <= _LONGEST_TEXT and redact_text(text) == text


@lru_cache(4096)
def _passes_remembered(text: str) -> bool:
    return redact_text(text) == text


def _is_digest(text: Text) -> bool:
    """Where a digest is due, what looks random is one."""
    fits = 7 <= len(text.text) <= 64 and _DIGEST_CHARACTERS.issuperset(text.text)
    due = (
        text.place[:1] in (("digests",), ("metadata_digest",))
        or text.place == ("about", "of")
        or (text.place[:1] == ("facts",) and text.place[2:3] == ("fingerprints",))
        or (text.place[:1] == ("facts",) and text.place[2:] == ("sglang", "commit"))
    )
    return fits and due and not text.is_name


def _shown(place: tuple[str, ...]) -> str:
    """A place for people; a name in it that should not be read is not said."""
    names = [
        name if name.isprintable() and len(name) <= _LONGEST_NAME and _passes(name)
        else "?"
        for name in ("*" if name.isdigit() else name for name in place)
    ]  # fmt: skip
    return ".".join(names) or "metadata"


def _holds_more(recording: Recording) -> dict[str, int]:
    places = document.differences(recording, document.kept(recording))
    return dict(sorted(Counter(document.kind_of(place) for place in places).items()))


def _list_version(recording: Recording) -> int | None:
    for facts in recording.facts:
        recorder = facts.get("recorder")
        version = recorder.get("list") if isinstance(recorder, dict) else None
        if isinstance(version, int):
            return version
    return None


def _free_texts(header: _Header) -> dict[str, int]:
    """Places of texts that are no plain name: models, and more than one word."""
    counts: Counter[str] = Counter()
    for text in _texts(header):
        if text.is_name or text.place[0] == "absent" or text.text in (REDACTED, NOT_RECORDED):
            continue
        model = text.place[-1] in _MODELS or text.place == ("about", "run")
        if model or " " in text.text.strip():
            counts[_general(text.place)] += 1
    return dict(sorted(counts.items()))


def _general(place: tuple[str, ...]) -> str:
    if place[0] == "tables":
        return "tables: the meaning of columns"
    if place[0] == "coverage" and place[1:2] == ("hooks",):
        return "coverage.hooks: what each hook is for"
    return _shown(place[:4])


def _unknown_parts(header: _Header) -> Iterator[str]:
    """What the reader passes over, so that nobody knows what it holds."""
    known = {*walk.JSON_ENTRIES, *walk.PLAIN_ENTRIES}
    for name, _ in header.entries:
        if name not in known:
            yield f"its metadata have an entry that padtrace does not write ({masked(name)})"
    tensors = {
        f"{table.name}/{column.name}{suffix}"
        for table in schema.all_tables()
        for column in table.columns
        for suffixes in ENCODINGS.values()
        for suffix in suffixes
    } | {"vector/values", "vector/offsets"}
    strange = [
        name
        for name, _ in header.raw
        if name != walk.METADATA and name not in tensors and not name.startswith(PREFIX)
    ]
    if strange:
        yield f"{len(strange)} tensors belong to no table that padtrace knows"
    twice = list(walk.twice_named(header.raw, ()))
    for name, value in header.entries:
        twice += walk.twice_named(value, (name,))
    for place in twice[:MOST_SUSPICIONS]:
        yield f"a name stands twice at {_shown(place)}, so that one of the two is not seen"


def _values(recording: Recording) -> str:
    """Which tensors' values the file holds, by field."""
    if not recording.values:
        return "no values of tensors"
    counts: dict[str, int] = {}
    for key, value in recording.values.items():
        kind = "integers" if value.dtype in INTEGERS else "activations or KV"
        name = f"{key.plain_field} ({kind})"
        counts[name] = counts.get(name, 0) + 1
    number = len(recording.values)
    return f"values of {number} tensor{'' if number == 1 else 's'}: {_counts(counts)}"


def _forbidden_values(recording: Recording, tier: str) -> list[str]:
    """Values that a file of this tier must not hold, one line for each field."""
    allowed = {"shape": (), "meta": ("meta",), "full": ("meta", "full")}.get(tier, ())
    fields = {
        key.plain_field: needed
        for key, value in recording.values.items()
        if (needed := tier_of(key, value)) not in allowed
    }
    return [
        f"it holds values of {name}, which only tier {needed} may hold"
        for name, needed in sorted(fields.items())
    ]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
