"""Made requests of a data-parallel server: what the benchmarks give SGLang to pad.

Every DP rank has requests that come and go and grow. With EAGLE one step is a draft, a verify and a
draft extend, without it one decode; now and then there is a prefill. All ranks of a server draw the
same numbers, so that they agree on everybody's counts, as the gather of a real server makes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_EAGLE_STEP, _PLAIN_STEP = ("draft", "verify", "draft_extend"), ("decode",)
_PREFILL_SHARE = 0.06
_WIDTH = {"decode": 1, "draft": 1, "verify": 2, "draft_extend": 2, "prefill": 1}
_MODES = {
    "decode": ("DECODE", None),
    "draft": ("DECODE", "draft"),
    "verify": ("TARGET_VERIFY", "verify"),
    "draft_extend": ("DRAFT_EXTEND_V2", "draft_extend"),
    "prefill": ("EXTEND", None),
}
_MOST_REQUESTS = 24


@dataclass(frozen=True, slots=True)
class Layout:
    """A server: data-parallel ranks of the attention, and attention TP inside each."""

    attn_dp: int
    attn_tp: int

    @property
    def ranks(self) -> int:
        return self.attn_dp * self.attn_tp


@dataclass(frozen=True, slots=True)
class Planned:
    """One forward of one rank: its kind, and its configuration with the keys of a case."""

    kind: str
    case: dict[str, Any]


def forwards(
    layout: Layout, dp_rank: int, count: int, *, eagle: bool = True, seed: int = 1
) -> list[Planned]:
    """`count` forwards of one DP rank, in the order of a run."""
    usual = _EAGLE_STEP if eagle else _PLAIN_STEP
    step, draw = _requests(layout, seed), random.Random(f"{seed}/prefills")
    planned: list[Planned] = []
    while len(planned) < count:
        lengths = step()
        kinds = ("prefill",) if draw.random() < _PREFILL_SHARE else usual
        planned += [Planned(kind, _case(kind, layout, dp_rank, lengths, draw)) for kind in kinds]
    return planned[:count]


def _requests(layout: Layout, seed: int) -> Callable[[], list[list[int]]]:
    """The lengths of the running requests of every DP rank, one step later at each call."""
    draw = random.Random(seed)
    lengths = [
        [draw.randrange(100, 9000) for _ in range(draw.randrange(3, 12))]
        for _ in range(layout.attn_dp)
    ]

    def step() -> list[list[int]]:
        for of_rank in lengths:
            if draw.random() < 0.08 and len(of_rank) > 1:
                of_rank.pop(draw.randrange(len(of_rank)))
            if draw.random() < 0.08 and len(of_rank) < _MOST_REQUESTS:
                of_rank.append(draw.randrange(50, 9000))
            for i in range(len(of_rank)):
                of_rank[i] += draw.choice((1, 2, 2, 2))
        return [list(of_rank) for of_rank in lengths]

    return step


def _case(
    kind: str, layout: Layout, dp_rank: int, lengths: list[list[int]], draw: random.Random
) -> dict[str, Any]:
    mode, spec = _MODES[kind]
    case: dict[str, Any] = {
        "forward_mode": mode,
        "spec": spec,
        "width": _WIDTH[kind],
        "attn_tp": layout.attn_tp,
        "attn_dp": layout.attn_dp,
        "dp_rank": dp_rank,
    }
    if kind != "prefill":
        counts = [len(of_rank) for of_rank in lengths]
        return {**case, "bs": counts, "raw_counts": counts, "seq_lens": lengths[dp_rank]}
    new = [draw.randrange(1, 3000) for _ in lengths]
    return {
        **case,
        "bs": [1] * len(new),
        "raw_counts": new,
        "extend_lens": [new[dp_rank]],
        "prefix_lens": [lengths[dp_rank][0]],
        "is_extend_in_batch": True,
    }
