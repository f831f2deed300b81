"""What is told of a process that died: its own last lines, not what a library says at its end."""

from __future__ import annotations

import io

from padtrace.children import _LastWords as LastWords

# As nanobind prints it when a worker that has imported Triton ends, whatever ended it.
LEAKS = b"""nanobind: leaked 518 functions!
 - leaked function "get_block"
 - leaked type "triton._C.libtriton.ir.block"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_the_cause_is_told_and_not_the_leaks_after_it() -> None:
    cause = b"Traceback (most recent call last):\nMemoryError: out of memory\n"
    words = LastWords(io.BytesIO(cause + LEAKS * 20)).text()
    assert words == "Traceback (most recent call last): | MemoryError: out of memory"


def test_a_process_with_nothing_but_leaks_wrote_nothing() -> None:
    assert LastWords(io.BytesIO(LEAKS)).text() == "it wrote nothing"


def test_a_line_that_only_mentions_nanobind_is_kept() -> None:
    assert LastWords(io.BytesIO(b"ImportError: nanobind\n")).text() == "ImportError: nanobind"
