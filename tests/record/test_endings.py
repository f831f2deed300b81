"""Which rank died first: the one that left neither an error nor a closed ring."""

from __future__ import annotations

from pathlib import Path

import pytest

from padtrace.record import wire
from padtrace.record.ring import EventWriter
from padtrace.record.seal import Sealed, seal
from padtrace.recording.absent import NONE_CODE
from tests.record.made_events import MadeRank, rank_facts

CLOSED, FAILED, SUDDEN = "closed", "failed", "sudden"


def server(folder: Path, *ends: str, ranks: int = 0) -> Sealed:
    """A run whose ranks end as told, each after as many forwards as its rank and two more."""
    for tp_rank, end in enumerate(ends):
        writer = EventWriter.create(folder, size_bytes=1 << 20, run="one")
        writer.facts(rank_facts(tp_rank=tp_rank, tp_size=ranks or len(ends), dp_size=1))
        made = MadeRank(writer, dp_rank=0, attn_tp=1)
        for _ in made.forwards(2 + tp_rank):
            pass
        if end == FAILED:
            head = {"enter_seq": 10**6, "parent": NONE_CODE, "t_ns": 1}
            error = {**head, "type": "RuntimeError", "function": "run_batch"}
            writer.write(wire.kind_index("error"), *made.numbers("error", error))
        if end == CLOSED:
            writer.close()
    return seal([folder])


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        ((CLOSED, CLOSED), []),
        ((FAILED, FAILED), []),
        # SGLang kills its processes when it is stopped: that names nobody.
        ((SUDDEN, SUDDEN, SUDDEN), []),
        ((FAILED, SUDDEN), [1]),
        ((SUDDEN, CLOSED, FAILED), [0]),
        ((SUDDEN, FAILED, SUDDEN, FAILED), [0, 2]),
    ],
)
def test_the_rank_that_died_is_named(
    tmp_path: Path, ends: tuple[str, ...], named: list[int]
) -> None:
    sealed = server(tmp_path, *ends)
    assert sealed.recording.coverage["blind"]["ended_suddenly"] == named
    lines = [note for note in sealed.notes if "suddenly" in note]
    assert [line.split()[:4] for line in lines] == [
        ["rank", str(rank), "ended", "suddenly:"] for rank in named
    ]
    # A rank's last forward is known: the made ones are numbered from 1 and had ended.
    for line, rank in zip(lines, named, strict=True):
        assert f"last seen after forward {2 + rank} of step" in line
    assert sealed.recording.about["notes"] == sealed.notes


def test_a_rank_that_died_before_its_first_forward(tmp_path: Path) -> None:
    server(tmp_path, FAILED, ranks=2)
    writer = EventWriter.create(tmp_path, size_bytes=1 << 20, run="one")
    writer.facts(rank_facts(tp_rank=1, tp_size=2, dp_size=1))
    sealed = seal([tmp_path])
    assert [note for note in sealed.notes if "suddenly" in note] == [
        "rank 1 ended suddenly: no error of its own, not closed; it made no forward"
    ]
