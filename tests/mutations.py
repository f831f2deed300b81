"""Shipped recordings changed at random, with digests made right again, and what becomes of them.

A mutation is told apart by its file and number alone: `python -m tests.mutations FILE FIRST COUNT`
makes and drives some of them under a memory limit and prints what came of it as JSON, and
`python -m tests.mutations FILE NUMBER --show` prints the recipe of one and drives it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import signal
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from padtrace.errors import PadtraceError
from padtrace.one_line import is_plain
from padtrace.recording.writer import digest, metadata_digest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "recordings"
NAMES = (
    *("30296-draft-extend-bs1-width6-tp8", "30296-draft-extend-bs3-width6-tp4"),
    *("34443-verify-bs1-width6-cp8", "crash", "healthy-dense"),
    *("healthy-dsa-eagle", "healthy-dsa-eagle-attention-tp-2"),
)
ALLOWED = (0, 1, 3, 5)
# A hang guard, no measure: a mutation takes a fraction of a second. CPU time, so that a machine
# that stands still is no hang.
SECONDS = 60
MEMORY_BYTES = 3 << 30
SIZES = {"I8": 1, "I16": 2, "I32": 4, "I64": 8}
_HOSTILE = (
    *("", "x" * 5000, "\x1b]0;gone\x07\x1b[2J", "[/] [red]x[link=http://x]y", "a\nb\r\tc"),
    *("\u202egnp.exe\u2066", "\x7f\x85\x9b31m", "\ufeff\u200b\u2028\u2029", "0/0/q.rows"),
    *("DECODE", "draft", "serve", "sync", "NONE", "0.5.18", "9" * 5000),
)
_NUMBERS = (
    *(-1, 0, 1, 2, 3, 127, 128, 255, 65536, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, 2**64),
    *(-(2**63), -(2**63) + 1, -(2**63) + 2, -(2**63) + 3, 10**30, -(10**30)),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 1.5, 1e308, [], {}, [[]], [None], [-1], ["x"], {"a": 1}, {"": []}),
    *_NUMBERS, *_HOSTILE,
)  # fmt: skip


@dataclass
class Opened:
    """A file taken apart: its texts, and of each tensor dtype, shape and bytes.

    `lies` holds offsets that are written instead of the true ones; `tail` follows the last tensor.
    """

    texts: dict[str, str]
    tensors: dict[str, tuple[str, list[Any], bytes]]
    lies: dict[str, list[Any]] = field(default_factory=dict)
    tail: bytes = b""
    cut: int = 0

    @classmethod
    def of(cls, data: bytes) -> Opened:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        texts = header.pop("__metadata__")
        start = 8 + length
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"], data[start + begin : start + end])
        return cls(texts, tensors)

    def sealed(self) -> bytes:
        """The file again, digests made right."""
        texts = dict(self.texts)
        texts["digests"] = json.dumps({n: digest(t[2]) for n, t in self.tensors.items()})
        with contextlib.suppress(TypeError, UnicodeEncodeError):
            texts["metadata_digest"] = metadata_digest(texts)
        header: dict[str, Any] = {"__metadata__": texts}
        parts = []
        reached = 0
        for name, (dtype, shape, data) in self.tensors.items():
            offsets = self.lies.get(name, [reached, reached + len(data)])
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            reached += len(data)
            parts.append(data)
        head = json.dumps(header).encode("utf-8", "surrogatepass")
        whole = b"".join([struct.pack("<Q", len(head)), head, *parts, self.tail])
        return whole[: len(whole) - self.cut]


def mutated(name: str, number: int) -> tuple[bytes, list[str]]:
    """One mutation of a shipped file and its recipe, a line for each change."""
    choice = random.Random(f"{name}/{number}")
    opened = Opened.of((FOLDER / f"{name}.safetensors").read_bytes())
    changes = choice.choices((1, 2, 3), (6, 2, 1))[0]
    recipe = [_change(opened, choice) for _ in range(changes)]
    return opened.sealed(), recipe


def _change(opened: Opened, choice: random.Random) -> str:
    kinds = (_element, _element, _element, _json, _json, _json, _string, _byte, _container, _text)
    return choice.choice(kinds)(opened, choice)


def _element(opened: Opened, choice: random.Random) -> str:
    """One number of a column, a dictionary, a list of rows or the vectors."""
    names = [name for name, tensor in opened.tensors.items() if tensor[2]]
    name = choice.choice(names)
    dtype, shape, data = opened.tensors[name]
    width = SIZES.get(dtype, 1)
    count = len(data) // width
    if not count:
        return f"{name} has nothing to change"
    low, high = -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1
    place = choice.randrange(count)
    old = int.from_bytes(data[place * width : (place + 1) * width], "little", signed=True)
    new = choice.choice((low, low + 1, low + 2, low + 3, -1, 0, 1, high, old - 1, old + 1))
    new = min(max(new, low), high)
    changed = bytearray(data)
    places = range(count) if choice.random() < 0.1 else (place,)
    for one in places:
        changed[one * width : (one + 1) * width] = new.to_bytes(width, "little", signed=True)
    opened.tensors[name] = (dtype, shape, bytes(changed))
    return f"{name}[{place if len(places) == 1 else ':'}] = {new}"


def _byte(opened: Opened, choice: random.Random) -> str:
    name = choice.choice([name for name, tensor in opened.tensors.items() if tensor[2]])
    dtype, shape, data = opened.tensors[name]
    place, bit = choice.randrange(len(data)), choice.randrange(8)
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    opened.tensors[name] = (dtype, shape, bytes(changed))
    return f"{name}: bit {bit} of byte {place}"


def _json(opened: Opened, choice: random.Random) -> str:
    """A value, a key or an entry somewhere in one of the JSON entries."""
    entry = choice.choice(("about", "coverage", "facts", "facts", "tables", "tables", "values"))
    try:
        root = json.loads(opened.texts[entry])
    except (KeyError, ValueError, RecursionError):
        return f"{entry} is no JSON any more"
    holder: Any = {entry: root}
    path: list[str] = []
    key: Any = entry
    while isinstance(holder[key], (dict, list)) and holder[key] and choice.random() < 0.85:
        holder = holder[key]
        key = choice.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        path.append(str(key))
    told = _act(holder, key, choice)
    if not path:
        root = holder.get(entry)
    opened.texts[entry] = json.dumps(root)
    return f"{entry} {'/'.join(path)}: {told}"


def _act(holder: Any, key: Any, choice: random.Random) -> str:
    old = holder[key]
    act = choice.choice(("set", "set", "set", "drop", "rename", "nudge", "twice", "deep"))
    if act == "drop":
        del holder[key]
        return "dropped"
    if act == "rename" and isinstance(holder, dict):
        new = choice.choice((*_HOSTILE, *map(str, holder)))
        holder[new] = holder.pop(key)
        return f"renamed to {new[:40]!r}"
    if act == "nudge" and isinstance(old, int):
        holder[key] = old + choice.choice((-1, 1, 1000, -(2**40)))
        return f"{old} -> {holder[key]}"
    if act == "twice" and isinstance(old, (list, str)):
        holder[key] = old * choice.choice((2, 3))
        return "twice or thrice itself"
    if act == "deep":
        for _ in range(choice.choice((5, 40, 400))):
            old = choice.choice(([old], {"x": old}))
        holder[key] = old
        return "nested"
    new = choice.choice(("plain", "constant", "delta", "dictionary", "same", *_VALUES))
    holder[key] = new
    return f"= {str(new)[:60]!r}"


def _string(opened: Opened, choice: random.Random) -> str:
    try:
        strings = json.loads(opened.texts["strings"])
        place = choice.randrange(len(strings))
    except (KeyError, ValueError, TypeError, RecursionError):
        return "there are no strings any more"
    act = choice.choice(("set", "drop", "insert", "other"))
    if act == "drop":
        del strings[place]
    elif act == "insert":
        strings.insert(place, choice.choice(_HOSTILE))
    else:
        strings[place] = choice.choice(_HOSTILE if act == "set" else strings)
    opened.texts["strings"] = json.dumps(strings)
    return f"strings[{place}]: {act}"


def _text(opened: Opened, choice: random.Random) -> str:
    """A metadata entry as text: gone, cut, with another character, or an added one."""
    entry = choice.choice(list(opened.texts))
    text = opened.texts[entry]
    act = choice.choice(("gone", "cut", "character", "other", "added"))
    place = choice.randrange(len(text) + 1) if text else 0
    if act == "gone":
        del opened.texts[entry]
    elif act == "cut":
        opened.texts[entry] = text[:place]
    elif act == "character":
        opened.texts[entry] = text[:place] + choice.choice('"[]{},:\\0\x1b') + text[place + 1 :]
    elif act == "other":
        opened.texts[entry] = choice.choice(("", "null", "[]", "{}", "[" * 5000, "1e999", "NaN"))
    else:
        opened.texts[choice.choice(_HOSTILE)] = text[:100]
    return f"text {entry} {act} at {place}"


def _container(opened: Opened, choice: random.Random) -> str:
    """Names, dtypes, shapes, offsets, and the ends of the file."""
    name = choice.choice(list(opened.tensors))
    dtype, shape, data = opened.tensors[name]
    act = choice.choice(
        ("dtype", "shape", "rows", "offsets", "gone", "name", "value", "tail", "cut")
    )
    if act == "dtype":
        dtype = choice.choice((*SIZES, "F32", "U8", "BOOL", "X", ""))
        if dtype in SIZES:
            shape = [len(data) // SIZES[dtype]]
            data = data[: shape[0] * SIZES[dtype]]
        opened.tensors[name] = (dtype, shape, data)
    elif act == "shape":
        numbers = (0, 1, -1, 2**31, 2**63, 10**30, len(data), 1.5, None)
        shape = [choice.choice(numbers) for _ in range(choice.randrange(6))]
        opened.tensors[name] = (dtype, shape, data)
    elif act == "rows":
        width = SIZES.get(dtype, 1)
        data = choice.choice((data[: len(data) // width // 2 * width], data + data, b""))
        opened.tensors[name] = (dtype, [len(data) // width], data)
    elif act == "offsets":
        opened.lies[name] = [choice.choice(_NUMBERS), choice.choice(_NUMBERS)]
    elif act == "gone":
        del opened.tensors[name]
    elif act == "name":
        opened.tensors[choice.choice((*_HOSTILE, *opened.tensors))] = opened.tensors.pop(name)
    elif act == "value":
        key = f"values/{choice.choice((0, 1, 99))}/{choice.choice((0, 2))}/exit.seq_lens"
        opened.tensors[key] = ("I64", [2], bytes(16))
        opened.texts["values"] = json.dumps({key: choice.choice(("int64", "float32", "x"))})
    elif act == "tail":
        opened.tail = bytes(choice.choice((1, 8, 1000)))
    else:
        opened.cut = choice.choice((1, 7, 1000, 30_000))
    return f"container {name}: {act}"


class Hang(BaseException):
    """The guard went off. No Exception, so that nothing takes it for an error of its own."""


def drive(data: bytes, original: Any) -> tuple[int, str]:
    """Everything that info, check, diff, show and ranks do with a file; the worst exit code.

    Returns:
        the exit code, and of a refusal its first reason.
    """
    from padtrace.recording.reader import from_bytes

    try:
        recording = from_bytes(data, "mutated.safetensors")
    except PadtraceError as error:
        _refusal(error)
        return error.exit_code, error.why
    codes = []
    why = ""
    for view in (_info, _check_and_diff, _show, _ranks, _two_files):
        try:
            codes.append(view(recording, original))
        except PadtraceError as error:
            _refusal(error)
            codes.append(error.exit_code)
            why = f"{view.__name__}: {error.what}: {error.why}"
    return max(codes), why


def _refusal(error: PadtraceError) -> None:
    assert 2 <= len(error.lines()) <= 3
    for line in error.lines():
        _plain(line)


def _plain(text: str) -> str:
    bad = {c for c in text if c != "\n" and not is_plain(c)}
    assert not bad, f"{bad!r} on a screen"
    return text


@contextlib.contextmanager
def _screen() -> Iterator[Any]:
    from padtrace.report.words import console

    file = io.StringIO()
    yield console(file, width=80)
    _plain(file.getvalue())


def _object(value: Any) -> None:
    from padtrace.report import json_output

    json.loads(_plain(json_output.text(value)))


def _info(recording: Any, original: Any) -> int:
    from padtrace.report import info_view, share_view
    from padtrace.sharing.check import share_check

    _object(info_view.as_json(recording, "REC"))
    proof = share_check(recording)
    _object(proof.as_json())
    with _screen() as out:
        info_view.print_info(out, recording, "REC")
        share_view.print_share_check(out, proof)
    return 0


def _check_and_diff(recording: Any, original: Any) -> int:
    from padtrace.contracts.engine import check
    from padtrace.contracts.known import KnownReports
    from padtrace.report import json_output, ranks_view, rows_view, terminal, verdicts

    reports = KnownReports.shipped()
    report = check(recording, known=reports)
    judgement = verdicts.of_report(report)
    _object(json_output.findings_object(recording, report, path="REC"))
    with _screen() as out:
        terminal.print_headline(out, judgement)
        rows_view.print_rows(out, recording)
        ranks_view.print_divergent_step(out, recording, report)
        terminal.print_report(
            out, recording, report, reports, judgement, path="REC", headline=False
        )
    return judgement.exit_code


def _show(recording: Any, original: Any) -> int:
    from itertools import islice

    from padtrace.report import show_view

    chosen = show_view.select(recording)
    for line in islice(show_view.json_lines(recording, chosen), 40):
        json.loads(_plain(line))
    with _screen() as out:
        show_view.print_events(out, recording, chosen, limit=30)
    return 0


def _ranks(recording: Any, original: Any) -> int:
    from padtrace.report import ranks_view

    result = ranks_view.side_by_side(recording)
    _object(result.as_json())
    with _screen() as out:
        ranks_view.print_ranks(out, result)
    return 0


def _two_files(recording: Any, original: Any) -> int:
    from padtrace.explore.differences import compare
    from padtrace.report import differences_view, verdicts

    result = compare(original, recording)
    _object([result.as_json(), result.totals()])
    with _screen() as out:
        differences_view.print_differences(out, result, ("A", "B"), (original, recording))
    return verdicts.CODES[verdicts.of_comparison(result)]


def guarded(name: str, number: int, original: Any) -> tuple[int, str]:
    """As `drive`, with what went wrong as its text and an exit code that is none."""

    def hang(signum: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return drive(mutated(name, number)[0], original)
    except Hang:
        return 124, f"it took more than {SECONDS} s of CPU: {traceback.format_exc(limit=-3)}"
    except Exception:
        return 70, traceback.format_exc(limit=-4)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(name: str, first: int, count: int, show: bool) -> None:
    from padtrace.recording.reader import read

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    original = read(FOLDER / f"{name}.safetensors")
    codes: Counter[int] = Counter()
    failures = []
    for number in range(first, first + count):
        code, why = guarded(name, number, original)
        codes[code] += 1
        if show:
            print(*mutated(name, number)[1], f"exit {code}: {why}", sep="\n", file=sys.stderr)
        if code not in ALLOWED:
            failures.append({"number": number, "recipe": mutated(name, number)[1], "why": why})
    print(json.dumps({"codes": codes, "failures": failures[:20]}))


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    shown = "--show" in sys.argv
    first, count = int(sys.argv[2]), 1 if shown else int(sys.argv[3])
    main(sys.argv[1], first, count, shown)
