"""No string of a file reaches a terminal raw, in any view, and none moves what stands beside it."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from rich.text import Text

from padtrace.errors import BadRecordingError
from padtrace.one_line import is_plain, one_line, safe_json
from padtrace.report import json_output, show_view
from padtrace.report.words import MAX_TEXT, console, plain
from tests.report.hostile import ESCAPED, HOSTILE, VIEWS, harmless, hostile, recording, screen
from tests.report.snapshots import compare_with_snapshot

REPORT = Path(__file__).resolve().parents[2] / "padtrace" / "report"
WIDTHS = (80, 160, 1400)
UNESCAPED = st.text(alphabet=st.characters(exclude_characters="\\"))
JSON = st.recursive(
    st.text() | st.integers(-(2**60), 2**60),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def is_clean(text: str) -> bool:
    return all(character == "\n" or is_plain(character) for character in text)


@pytest.mark.parametrize("view", VIEWS)
def test_the_screen_shows_the_strings_escaped(view: str) -> None:
    text = screen(view, hostile, 100)
    assert is_clean(text)
    compare_with_snapshot(f"hostile-{view}", text)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", sorted(VIEWS.keys() - {"share-check"}))
def test_every_line_stands_where_it_stands_in_the_harmless_twin(view: str, width: int) -> None:
    """What is no part of a string, verdicts above all, has the same place on both screens."""
    bad, good = (screen(view, words, width).splitlines() for words in (hostile, harmless))
    assert [len(line) for line in bad] == [len(line) for line in good]
    for line, twin in zip(bad, good, strict=True):
        assert all(their in ("x", our) for our, their in zip(line, twin, strict=True)), line
    assert max(map(len, bad)) <= width or view in ("info",)  # its last line is to be copied
    assert "\\x1b" in "".join(bad)


@pytest.mark.parametrize("width", WIDTHS)
def test_long_names_leave_the_numbers_beside_them_whole(width: int) -> None:
    ranks = screen("ranks", hostile, width).splitlines()
    (head,) = [line.split() for line in ranks if " planned " in line]
    assert head == ["rank", "mode", "padding", "run", "real", "planned", "padded", "buffer"]
    (first,) = [line.split() for line in ranks if line.split()[:1] == ["0"]]
    assert [first[0], *first[3:]] == ["0", "eager", "1", "1", "2", "-"]
    across = screen("across", hostile, width).splitlines()
    rows = [line.split() for line in across if line.startswith("  0.5.1")]
    assert [row[1:4] for row in rows] == [["divergent", "2", "3"]] * 2


def test_the_hostile_strings_are_hostile() -> None:
    """On a plain console of rich they would be obeyed: otherwise this file shows nothing."""
    file = io.StringIO()
    Console(file=file, width=200, force_terminal=True).print(HOSTILE)
    assert "\x1b" in file.getvalue()
    assert "[red]" not in file.getvalue()
    assert "\\x1b[31m" in ESCAPED
    assert "[red]a[/][link=http://e]b[/link]" in ESCAPED
    for mark in (r"\n", r"\r", r"\t", r"\x07", r"\x7f", r"\x9b", r"\u202e", r"\u2066", r"\u200b"):
        assert mark in ESCAPED


@pytest.mark.parametrize("colours", [False, True])
def test_what_a_view_forgets_is_escaped_where_it_leaves_the_console(colours: bool) -> None:
    file = io.StringIO()
    out = console(file, width=300)
    out._force_terminal = colours
    out.print(Text(HOSTILE))
    out.print(HOSTILE)
    out.print(f"{HOSTILE}!", style="bold")
    table = Table(title=Text(HOSTILE))
    table.add_column(Text(HOSTILE))
    table.add_row(Text(HOSTILE, style="link http://e"))
    out.print(table)
    text = file.getvalue()
    if colours:
        for ours in ("\x1b[1m", "\x1b[3m", "\x1b[0m"):
            text = text.replace(ours, "")
    assert is_clean(text)
    assert "[red]" in text


def test_a_long_string_is_cut_on_the_screen_and_whole_in_json() -> None:
    assert plain("a" * 5000).plain == "a" * (MAX_TEXT - 3) + "..."
    file = io.StringIO()
    table = Table.grid()
    table.add_column(overflow="fold")
    table.add_row("b" * 5000)
    console(file, width=80).print(table)
    assert file.getvalue().count("b") == MAX_TEXT - 3
    assert json.loads(json_output.text(["b" * 5000])) == ["b" * 5000]


def test_no_report_makes_a_text_of_its_own() -> None:
    """`plain` makes them, which escapes; markup and a console of rich's own would not."""
    for path in sorted(REPORT.glob("*.py")):
        if path.name == "words.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("Text", "Console", "print", "Text.from_markup"), path.name
                assert not name.endswith("from_ansi"), path.name


def test_json_of_a_file_decodes_to_the_same_and_holds_nothing_to_obey() -> None:
    made = recording(hostile)
    lines = list(show_view.json_lines(made, show_view.select(made)))
    assert hostile("flash_mla") in [json.loads(line).get("function") for line in lines]
    for line in [*lines, json_output.text([made.about, made.facts, made.coverage])]:
        assert is_clean(line)
    assert json.loads(json_output.text(made.facts)) == made.facts


@given(st.text())
def test_one_line_is_plain_and_keeps_what_is(text: str) -> None:
    shown = one_line(text)
    assert "\n" not in shown
    assert is_clean(shown)
    assert one_line(shown) == shown
    if is_clean(text) and "\n" not in text:
        assert shown == text


@given(UNESCAPED, UNESCAPED)
def test_different_texts_look_different(left: str, right: str) -> None:
    """As long as no backslash stands in them, an escape can be read back."""
    assert (one_line(left) == one_line(right)) is (left == right)


@given(JSON)
def test_json_is_valid_and_says_the_same(value: object) -> None:
    text = json_output.text(value)
    assert is_clean(text)
    assert json.loads(text) == value
    assert "\n" not in json_output.line(value)
    assert json.loads(json_output.line(value)) == value


def test_a_name_that_is_no_utf8_is_json_too() -> None:
    name = b"r\xe9c\xff".decode(errors="surrogateescape")
    assert json.loads(json_output.text({"path": name})) == {"path": name}
    assert is_clean(json_output.text({"path": name}))


@pytest.mark.parametrize("character", ["\x7f", "\x85", "\u2028", "\u202e", "\U000e0001", "\ud800"])
def test_each_kind_is_escaped_in_json(character: str) -> None:
    text = safe_json(json.dumps(character, ensure_ascii=False))
    assert is_clean(text)
    assert json.loads(text) == character


def test_the_lines_of_an_error_are_lines() -> None:
    error = BadRecordingError(*(hostile(part) for part in ("what", "why", "hint")))
    assert error.lines() == [f"{part}{ESCAPED}" for part in ("what", "why", "hint")]
