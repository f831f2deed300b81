"""What a file may hold is bounded, typed, in range; padtrace never writes what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padtrace.errors import BadRecordingError, UsageError
from padtrace.recording import limits, reader, writer
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.document import markdown
from padtrace.recording.model import Recording
from tests.mutations import FOLDER, SIZES, Opened
from tests.recording.helpers import small_recording

Change = Callable[[Opened], None]


def _sealed(change: Change) -> bytes:
    opened = Opened.of(writer.to_bytes(small_recording()))
    change(opened)
    return opened.sealed()


def _set(entry: str, *path: Any, value: Any) -> Change:
    """Put a value into one of the JSON entries."""

    def change(opened: Opened) -> None:
        root = json.loads(opened.texts[entry])
        holder = root
        for key in path[:-1]:
            holder = holder[key] if isinstance(holder, list) else holder.setdefault(key, {})
        holder[path[-1]] = value
        opened.texts[entry] = json.dumps(root)

    return change


def _column(name: str, values: list[int]) -> Change:
    """Give a column these values, plain."""
    table, _, column = name.partition("/")

    def change(opened: Opened) -> None:
        data = np.array(values, dtype=np.int64).tobytes()
        opened.tensors[name] = ("I64", [len(values)], data)
        _set("tables", table, "columns", column, "encoding", value="plain")(opened)

    return change


NONE, NO_ATTRIBUTE, NOT_OBSERVED = -(2**63), -(2**63) + 1, -(2**63) + 2
DEEP: Any = 1
for _ in range(limits.MAX_DEPTH + 1):
    DEEP = [DEEP]
TOO_LONG = "x" * (limits.MAX_STRING + 1)

REFUSED: dict[str, tuple[Change, str]] = {
    # absent codes where an event could not be placed without a value
    "no process": (_column("pad/process", [0, NONE]), "pad/process has no value in row 1"),
    "no such process": (_column("pad/process", [0, NO_ATTRIBUTE]), "pad/process has no value"),
    "a process nobody saw": (_column("error/process", [NOT_OBSERVED, 0]), "error/process"),
    "no order": (_column("plan/enter_seq", [0, NOT_OBSERVED]), "plan/enter_seq has no value"),
    # indices out of range
    "a process past the last": (_column("pad/process", [0, 2]), "points past the 2 entries"),
    "a process before the first": (_column("pad/process", [0, -1]), "points past the 2 entries"),
    "a string past the last": (_column("pad/worker", [0, 99]), "pad/worker points past"),
    "a snapshot past the last": (_column("pad/exit", [0, 2]), "pad/exit points past the 2"),
    "a vector past the last": (
        _column("snapshot/global_num_tokens_cpu", [0, 3]), "points past the 3 entries",
    ),
    "a list of strings past the last": (
        lambda opened: opened.tensors.update({"vector/values": ("I8", [4], bytes([6, 8, 5, 99]))}),
        "error/frames lists a string past the last",
    ),
    "a list with a string before the first": (
        lambda opened: opened.tensors.update({"vector/values": ("I8", [4], bytes([6, 8, 5, 255]))}),
        "error/frames lists a string past the last",
    ),
    "a chain without text": (_set("about", "chains", value={"0/2/q": 0}), "a chain points past"),
    "a chain before the first": (
        lambda opened: [
            _set("about", "chain_texts", value=[["6"]])(opened),
            _set("about", "chains", value={"0/2/q": -1})(opened),
        ][0],
        "a chain points past",
    ),
    # types
    "a number for a source": (_set("about", "source", value=3), "Expected `str`"),
    "a note that is no text": (_set("about", "notes", value=[1]), "notes"),
    "a command that is a list": (_set("about", "command", value=["a"]), "command"),
    "a release that is a number": (_set("about", "sglang", value=0.5), "sglang"),
    "a chain that is no number": (_set("about", "chains", value={"a": "b"}), "chains"),
    "hooks that are a list": (_set("coverage", "hooks", value=[]), "hooks"),
    "a hook that is a text": (_set("coverage", "hooks", "pad", value="found"), "hooks"),
    "a status that is a number": (_set("coverage", "hooks", "pad", "status", value=1), "status"),
    "missing ranks by name": (_set("coverage", "blind", "missing_ranks", value=["1"]), "missing"),
    "drops that are no numbers": (_set("coverage", "blind", "dropped", value={"0": "a"}), "drop"),
    "a replay that is a list": (_set("coverage", "replay", value=[]), "replay"),
    "outcomes without numbers": (
        _set("coverage", "replay", "kernel", "outcomes", value={"ended": None}), "outcomes",
    ),
    "facts of the wrong type": (_set("facts", 1, "environment", value=["A=1"]), "environment"),
    "cases that are a number": (_set("facts", 0, "case", value={"cases": 3}), "cases"),
    # bounds
    "a long string": (_set("strings", 0, value=TOO_LONG), "4097 characters; the limit is 4096"),
    "a long note": (_set("about", "notes", value=[TOO_LONG]), "about: it holds a string of 4097"),
    "a long key": (_set("coverage", TOO_LONG, value=1), "coverage: it holds a string of 4097"),
    "a long fact": (_set("facts", 0, "host", value=TOO_LONG), "facts: it holds a string of 4097"),
    "deep facts": (_set("facts", 0, "x", value=DEEP), "facts: it is nested deeper than 32"),
    "a wide number": (_set("about", "exit_code", value=2**70), "more than 64 bits"),
    "a wide constant": (
        _set("tables", "pad", "columns", "worker", "constant", value=2**63), "constant",
    ),
    "very many lists": (
        lambda opened: opened.texts.update(coverage='{"x":[' + "[]," * (1 << 20) + "[]]}"),
        "the limit is 1048576",
    ),
    "more ranks than a server has": (_column("process/tp_size", [2**31, 1]), "number of a rank"),
    "a product of ranks": (
        lambda opened: [
            _column("process/tp_size", [2**15, 1])(opened),
            _column("process/pp_size", [8, 1])(opened),
        ][0],
        "262144 ranks",
    ),
    "a negative rank": (_column("process/global_rank", [-5, 1]), "number of a rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_words(name: str) -> None:
    change, words = REFUSED[name]
    with pytest.raises(BadRecordingError) as caught:
        reader.from_bytes(_sealed(change), "some/small.safetensors")
    assert caught.value.exit_code == 3
    assert words in caught.value.why
    what, why, hint = caught.value.lines()
    assert what == "bad recording: small.safetensors"
    assert len(why) <= 300
    assert hint


def test_no_place_that_counts_rows_may_hold_an_absent_code() -> None:
    """Indices of dictionaries, rows at which steps start afresh, offsets of vectors: each in turn.

    The three lowest numbers of a narrow type are wide ones in memory, and int64 ends near them.
    """
    opened = Opened.of((FOLDER / "healthy-dsa-eagle.safetensors").read_bytes())
    names = [
        name
        for name in opened.tensors
        if name.endswith(".fresh_rows") or f"{name}.dictionary" in opened.tensors
    ]
    assert len(names) > 10
    for name in [*names, "vector/offsets"]:
        dtype, shape, data = opened.tensors[name]
        width = SIZES[dtype]
        places = {0, 1, shape[0] // 2, shape[0] - 2, shape[0] - 1} & set(range(shape[0]))
        for place in places:
            for code in range(3):
                changed = bytearray(data)
                lowest = (-(2 ** (8 * width - 1)) + code).to_bytes(width, "little", signed=True)
                changed[place * width : (place + 1) * width] = lowest
                opened.tensors[name] = (dtype, shape, bytes(changed))
                with pytest.raises(BadRecordingError):
                    reader.from_bytes(opened.sealed(), f"{name}[{place}]")
        opened.tensors[name] = (dtype, shape, data)


UNCHANGED: dict[str, Change] = {
    "nothing": lambda opened: None,
    "an unknown key of about": _set("about", "later", value={"a": [1]}),
    "an unknown key of coverage": _set("coverage", "later", value=[None]),
    "an unknown key of a hook": _set("coverage", "hooks", "pad", "later", value=1),
    "an unknown fact": _set("facts", 0, "later", value="x" * limits.MAX_STRING),
    "a step nobody observed": _column("pad/step", [1, NOT_OBSERVED]),
    "a snapshot nobody took": _column("pad/exit", [1, NONE]),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_a_later_padtrace_may_add_is_read_and_kept(name: str) -> None:
    recording = reader.from_bytes(_sealed(UNCHANGED[name]), "memory")
    assert len(list(recording.events())) == 6
    again = reader.from_bytes(writer.to_bytes(recording), "memory")
    assert again.facts == recording.facts
    assert again.coverage == recording.coverage
    producer = {"producer": recording.about["producer"]}
    assert {**again.about, **producer} == recording.about


FREE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.text(max_size=9)
    | st.sampled_from([TOO_LONG, "y" * 9000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(FREE, st.text(max_size=4) | st.just(TOO_LONG))
def test_what_is_written_can_be_read(value: Any, name: str) -> None:
    builder = RecordingBuilder({"source": "made", "later": value, "notes": [name]})
    builder.add_process({"tp_rank": 0}, {"later": value, "server_args": {"key": value}})
    row = builder.add_event("pad", {"process": 0, "enter_seq": 0, "function": name})
    back = reader.from_bytes(writer.to_bytes(builder.finish({"later": value})), "memory")
    assert back.event("pad", row).text("function") == limits.cut(name)


def test_a_long_string_says_how_much_of_it_was_cut() -> None:
    assert limits.cut("y" * 4096) == "y" * 4096
    text = limits.cut("y" * 9000)
    assert len(text) == 4096
    assert text.endswith("yyy... [cut: 9000 characters]")
    assert limits.fitted({"a": ["z" * 5000]}) == {"a": [limits.cut("z" * 5000)]}


def test_too_deep_json_says_so() -> None:
    value: Any = "bottom"
    for _ in range(100):
        value = [value]
    text = json.dumps(limits.fitted(value))
    assert limits.TOO_DEEP in text
    assert "bottom" not in text
    assert limits.problem_of(limits.fitted(value)) is None


def test_the_arithmetic_that_does_not_fit_is_left_out_and_said() -> None:
    recording = small_recording()
    texts = [[f"{number} " + "x" * 4000] for number in range(5000)]
    recording.about.update(chain_texts=texts, chains={"0/2/q": 4999})
    back = reader.from_bytes(writer.to_bytes(recording), "memory")
    assert back.about["chains"] == {}
    assert "did not fit" in back.about["notes"][-1]


def test_what_does_not_fit_at_all_is_not_written() -> None:
    recording = small_recording()
    recording.facts[0]["server_args"] = {str(number): "x" * 4000 for number in range(5000)}
    with pytest.raises(UsageError, match="the facts of a process is too much"):
        writer.to_bytes(recording)


def test_there_is_room_for_so_many_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STRINGS", 4)
    builder = RecordingBuilder({"source": "made"})
    codes = [builder.string_code(text) for text in ("a", "b", "c", "d", "e", "a")]
    assert codes == [0, 1, 2, 3, 3, 0]
    made: Recording = builder.finish()
    assert made.strings == ["a", "b", "c", limits.TOO_MANY_STRINGS]
    assert limits.problem_of_strings(made.strings) is None
    assert limits.problem_of_strings([*made.strings, "f"]) is not None


def test_the_page_tells_every_limit() -> None:
    text = markdown()
    for limit in ("4,096 characters", "1,048,576", "32 levels", "16 MiB", "65,536", "64 bits"):
        assert limit in text
    assert "| `process` | int, always |" in text
    assert "| `enter_seq` | int, always |" in text
    assert text.count(", always |") == 2
