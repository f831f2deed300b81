"""Parts of the worker that need no SGLang: strictness, chains, lengths, grouping, edits."""

from __future__ import annotations

import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padtrace.explore.make import make
from padtrace.replay.worker.events import HEADER
from padtrace.replay.worker.groups import EventIndex
from padtrace.replay.worker.provenance import Provenance, Traced, chain_of
from padtrace.replay.worker.standins import NotHeldError, StandIn, Unobserved

VERIFY = {"forward_mode": "TARGET_VERIFY", "spec": "verify", "width": 6, "bs": [1], "attn_tp": 8}


def test_a_stand_in_refuses_even_a_read_with_a_default() -> None:
    runner = StandIn("model_runner", {"page_size": 64}, absent=("enable_elastic_ep",))
    assert runner.page_size == 64
    assert getattr(runner, "enable_elastic_ep", "no") == "no"
    with pytest.raises(NotHeldError) as caught:
        getattr(runner, "sliding_window", None)
    assert "model_runner.sliding_window" in caught.value.what
    with pytest.raises(NotHeldError):
        hasattr(runner, "sliding_window")


def test_the_line_that_read_it_is_named(tmp_path: object) -> None:
    code = compile("\n\nread(runner)", "/somewhere/sglang/srt/layers/pad.py", "exec")

    def read(runner: StandIn) -> object:
        return runner.attn_backend

    with pytest.raises(NotHeldError) as caught:
        exec(code, {"read": read, "runner": StandIn("model_runner", {})})
    assert caught.value.why == "it is read at sglang/srt/layers/pad.py:3 in <module>"


@pytest.mark.parametrize(
    "touch",
    [
        bool,
        len,
        list,
        int,
        lambda value: value + 1,
        lambda value: 1 + value,
        lambda value: value[0],
        lambda value: value.shape,
        lambda value: value < 1,
        lambda value: value // 2,
    ],
)
def test_a_value_nobody_observed_cannot_be_touched(touch: object) -> None:
    with pytest.raises(NotHeldError) as caught:
        touch(Unobserved("forward_batch.seq_lens"))  # type: ignore[operator]
    assert "forward_batch.seq_lens" in caught.value.what


def _helpers() -> types.ModuleType:
    """A module as SGLang's: it holds a helper by name, and calls it."""
    module = types.ModuleType("helpers")
    source = (
        "def ceil_align(value, by):\n"
        "    return -(-value // by) * by\n"
        "def pad(count, attn_tp_size):\n"
        "    return ceil_align(count, attn_tp_size)\n"
    )
    exec(compile(source, "helpers", "exec"), module.__dict__)
    return module


def test_a_length_carries_the_steps_that_made_it() -> None:
    provenance, module = Provenance(), _helpers()
    provenance.wrap_arithmetic([module])
    padded = module.pad(6, 8)
    assert padded == 8
    # The name of the argument is read from the source file; this module has none.
    assert chain_of(padded) == ("6", "ceil_align(by=8) -> 8")
    twice = module.pad(padded, 16)
    assert chain_of(twice) == ("6", "ceil_align(by=8) -> 8", "ceil_align(by=16) -> 16")
    assert chain_of(7) == ("7",)


def test_without_provenance_nothing_is_traced() -> None:
    provenance, module = Provenance(), _helpers()
    provenance.wrap_arithmetic([module])
    provenance.enabled = False
    assert not isinstance(module.pad(6, 8), Traced)


def test_the_largest_rank_is_a_step_of_its_own() -> None:
    provenance = Provenance()
    provenance.mode, provenance.mode_counts = "MAX_LEN", [4, 12]
    chain = provenance.rows_chain(12, Traced.of(12, ("3", "x num_tokens_per_req=4 -> 12")))
    assert chain == ("3", "x num_tokens_per_req=4 -> 12", "MAX_LEN over ranks [4, 12] -> 12")


def test_spec_scaling_is_a_step() -> None:
    scaled = Provenance().scaled([1, 3], [6, 18], 6)
    assert [chain_of(count) for count in scaled] == [
        ("1", "x num_tokens_per_req=6 -> 6"),
        ("3", "x num_tokens_per_req=6 -> 18"),
    ]


# The first example imports torch.
@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64))
def test_rebuilt_lengths_agree_with_what_was_recorded(lengths: list[int]) -> None:
    batches = pytest.importorskip("padtrace.replay.worker.batches", reason="needs torch")
    rebuilt = batches.spread(len(lengths), sum(lengths), max(lengths))
    assert len(rebuilt) == len(lengths)
    assert sum(rebuilt) == sum(lengths)
    assert max(rebuilt) == max(lengths)
    assert min(rebuilt) >= 1


def test_equal_batches_have_equal_keys_and_others_do_not() -> None:
    other = {**VERIFY, "bs": [2]}
    groups = list(EventIndex(make([VERIFY, other, VERIFY]), range(1)).groups(0))
    assert len(groups) == 3
    assert groups[0].key == groups[2].key
    assert groups[0].key != groups[1].key


def test_events_nest_as_they_were_recorded() -> None:
    (group,) = EventIndex(make(VERIFY), range(1)).groups(0)
    roots = group.tree()
    assert [node.event.kind for node in roots] == ["batch", "forward"]
    assert [node.event.kind for node in roots[0].children] == ["sync"]
    assert [node.event.kind for node in roots[1].children] == ["pad", "plan", "launch", "unpad"]


def test_an_event_reads_like_the_recording_says() -> None:
    recording = make(VERIFY)
    (group,) = EventIndex(recording, range(1)).groups(0)
    for event, decoded in zip(group.events, recording.events(), strict=True):
        header = {name: event[name] for name in HEADER}
        assert {**header, **event.own()} == decoded.values
