"""A configuration as people write it: the keys of a case, checked before anything is made.

The keys and their meaning are those of the case files of the padding tests (`tests/cases`). Every
mistake is a `UsageError` that names the key; every number has a bound, so that a typing error
cannot ask for a batch of a billion requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from padtrace.errors import UsageError

FORWARD_MODES = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "EXTEND", "IDLE")
SPEC_KINDS = ("verify", "draft", "draft_extend")
CP_MODES = ("in-seq-split", "round-robin-split")
GRAPH_RUNNERS = ("decode", "eagle_draft", "eagle_draft_extend")
DEVICES = ("cpu", "sm90", "sm100", "hip")
ALGORITHMS = ("NONE", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH", "FROZEN_KV_MTP")

MAX_RANKS = 1024
MAX_REQUESTS = 65_536
MAX_WIDTH = 1024
MAX_TOKENS = 1 << 20
MAX_STEPS = 64
MAX_CASES = 100_000

_KEYS = (
    *("forward_mode", "spec", "width", "bs", "raw_counts", "attn_tp", "attn_cp", "attn_dp"),
    *("dp_rank", "cp_v2", "cp_mode", "is_extend_in_batch", "extend_lens", "prefix_lens"),
    *("seq_lens", "hidden_states", "logits_hidden", "steps", "draft_worker", "draft_raw"),
    *("draft_token_num", "logprob_width", "graph", "prefill_graph_bs", "can_run_prefill_graph"),
    *("custom_ar_max", "no_dsa", "device", "topk", "mlp_sync"),
)

_MODE_OF_SPEC = {
    "DECODE": (None, "draft"),
    "TARGET_VERIFY": ("verify",),
    "DRAFT_EXTEND_V2": ("draft_extend",),
    "EXTEND": (None, "draft_extend", "draft"),
    "IDLE": (None, "verify", "draft", "draft_extend"),
}


@dataclass(frozen=True, slots=True)
class GraphInput:
    """Which graph runners judge the batch, and under which speculative algorithm."""

    algorithm: str
    runners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CaseInput:
    """One configuration, complete and checked.

    Attributes:
        requests: requests per DP rank.
        raw_counts: the per-rank counts the scheduler holds before spec scaling.
        draft_raw: the same for a draft worker that has counts of its own; None otherwise.
        hidden_states, logits_hidden: False where the tensor is None.
        dsa: False where only the pad function of the DSA backend is run, without a backend.
        device: what SGLang is shown.
        topk: `speculative_eagle_topk`: rows per request of a draft's forwards.
        mlp_sync: whether ranks synchronise their counts before a forward, as servers with DP or
            gathered buffers do; without it nothing is padded.
    """

    case_id: str
    forward_mode: str
    spec: str | None
    width: int
    attn_tp: int
    attn_cp: int
    attn_dp: int
    dp_rank: int
    cp_v2: bool
    cp_mode: str
    requests: tuple[int, ...]
    raw_counts: tuple[int, ...]
    is_extend_in_batch: bool
    extend_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    hidden_states: bool
    logits_hidden: bool
    steps: int
    draft_worker: bool
    draft_raw: tuple[int, ...] | None
    draft_token_num: int
    logprob_width: int | None
    graph: GraphInput | None
    prefill_graph_bs: tuple[int, ...]
    can_run_prefill_graph: bool
    custom_ar_max: int | None
    dsa: bool
    device: str
    topk: int
    mlp_sync: bool

    @property
    def batch_size(self) -> int:
        """Requests of the rank under test."""
        if self.forward_mode == "IDLE":
            return 0
        return self.requests[self.dp_rank] if len(self.requests) > 1 else self.requests[0]

    @property
    def worker(self) -> str:
        """Whose model runner the batch belongs to."""
        draft = self.draft_worker or self.spec in ("draft", "draft_extend")
        return "draft" if draft else "target"


_Value = TypeVar("_Value")


class _Keys:
    """Takes keys out of a mapping, so that what nobody took is an unknown key."""

    def __init__(self, raw: dict[str, Any], name: str) -> None:
        self._left = dict(raw)
        self._name = name

    def take(self, key: str, default: Any, read: Callable[[Any], _Value]) -> _Value:
        try:
            return read(self._left.pop(key, default))
        except ValueError as error:
            raise case_error(self._name, f"key {key!r} {error}") from None

    def finish(self) -> None:
        if self._left:
            raise case_error(self._name, f"unknown key {sorted(self._left)[0]!r}")


def case_error(name: str, why: str) -> UsageError:
    """The error of one bad configuration; `name` says which."""
    return UsageError(
        f"cannot make a recording from {name}",
        why,
        f"keys are {', '.join(_KEYS)}",
    )


def read_case(raw: Any, position: int) -> CaseInput:
    """One case, from `{"id": ..., "input": {...}}` or from a bare input.

    Raises:
        UsageError: with the key that is wrong.
    """
    name = f"case {position}"
    if not isinstance(raw, dict):
        raise case_error(name, f"it is a {type(raw).__name__}, not an object")
    if "input" in raw:
        case_id = raw.get("id", name)
        if not isinstance(case_id, str) or len(case_id) > 200:
            raise case_error(name, "key 'id' must be a short text")
        name, raw = f"case {case_id!r}", raw["input"]
        if not isinstance(raw, dict):
            raise case_error(name, "key 'input' must be an object")
    else:
        case_id = name
    return _read_input(raw, case_id, name)


def _read_input(raw: dict[str, Any], case_id: str, name: str) -> CaseInput:
    keys = _Keys(raw, name)
    mode = keys.take("forward_mode", None, _one_of(FORWARD_MODES))
    spec = keys.take("spec", None, _optional(_one_of(SPEC_KINDS)))
    width = keys.take("width", 1, _integer(1, MAX_WIDTH))
    requests = keys.take("bs", None, _integers(0, MAX_REQUESTS, MAX_RANKS))
    attn_dp = keys.take("attn_dp", len(requests), _integer(1, MAX_RANKS))
    dp_rank = keys.take("dp_rank", 0, _integer(0, attn_dp - 1))
    extend_lens = keys.take("extend_lens", [], _integers(1, MAX_TOKENS, MAX_REQUESTS))
    default_counts = _default_counts(mode, requests, extend_lens, dp_rank)
    draft_token_num = keys.take("draft_token_num", width, _integer(1, MAX_WIDTH))
    case = CaseInput(
        case_id=case_id,
        forward_mode=mode,
        spec=spec,
        width=width,
        attn_tp=keys.take("attn_tp", 1, _integer(1, MAX_RANKS)),
        attn_cp=keys.take("attn_cp", 1, _integer(1, MAX_RANKS)),
        attn_dp=attn_dp,
        dp_rank=dp_rank,
        cp_v2=keys.take("cp_v2", False, _boolean),
        cp_mode=keys.take("cp_mode", "round-robin-split", _one_of(CP_MODES)),
        requests=requests,
        raw_counts=keys.take("raw_counts", default_counts, _integers(0, MAX_TOKENS, MAX_RANKS)),
        is_extend_in_batch=keys.take("is_extend_in_batch", mode == "EXTEND", _boolean),
        extend_lens=extend_lens,
        prefix_lens=keys.take("prefix_lens", [], _integers(0, MAX_TOKENS, MAX_REQUESTS)),
        seq_lens=keys.take("seq_lens", [], _integers(1, MAX_TOKENS, MAX_REQUESTS)),
        hidden_states=keys.take("hidden_states", True, _present),
        logits_hidden=keys.take("logits_hidden", True, _present),
        steps=keys.take("steps", 1, _integer(1, MAX_STEPS)),
        draft_worker=keys.take("draft_worker", False, _boolean),
        draft_raw=keys.take("draft_raw", None, _optional(_integers(0, MAX_TOKENS, MAX_RANKS))),
        draft_token_num=draft_token_num,
        logprob_width=keys.take("logprob_width", None, _optional(_integer(1, MAX_WIDTH))),
        graph=keys.take("graph", None, _optional(_graph)),
        prefill_graph_bs=keys.take("prefill_graph_bs", [], _integers(1, MAX_TOKENS, 4096)),
        can_run_prefill_graph=keys.take("can_run_prefill_graph", False, _boolean),
        custom_ar_max=keys.take("custom_ar_max", None, _optional(_integer(0, 1 << 40))),
        dsa=not keys.take("no_dsa", False, _boolean),
        device=keys.take("device", "cpu", _one_of(DEVICES)),
        topk=keys.take("topk", 1, _integer(1, MAX_WIDTH)),
        mlp_sync=keys.take("mlp_sync", True, _boolean),
    )
    keys.finish()
    _check_together(case, name)
    return case


def _default_counts(
    mode: str, requests: tuple[int, ...], extend_lens: tuple[int, ...], dp_rank: int
) -> list[int]:
    """Requests per rank, as a scheduler counts a decode round; tokens for an extend."""
    counts = list(requests)
    if mode == "EXTEND" and dp_rank < len(counts):
        counts[dp_rank] = sum(extend_lens)
    return counts


def _check_together(case: CaseInput, name: str) -> None:
    """What no key can show alone."""
    ranks = len(case.requests)
    if ranks not in (1, case.attn_dp):
        raise case_error(name, f"key 'bs' has {ranks} entries, but 'attn_dp' is {case.attn_dp}")
    if len(case.raw_counts) not in (1, case.attn_dp):
        raise case_error(
            name,
            f"key 'raw_counts' has {len(case.raw_counts)} entries, but 'attn_dp' is {case.attn_dp}",
        )
    if case.spec not in _MODE_OF_SPEC[case.forward_mode]:
        raise case_error(name, f"key 'spec' is {case.spec!r}, which {case.forward_mode} never has")
    if case.forward_mode != "IDLE" and case.batch_size == 0:
        raise case_error(name, "key 'bs' gives the rank under test no request, and it is not IDLE")
    if case.draft_raw is not None and len(case.draft_raw) != len(case.raw_counts):
        raise case_error(name, "key 'draft_raw' and key 'raw_counts' have different lengths")
    _check_lengths(case, name)


def _check_lengths(case: CaseInput, name: str) -> None:
    wanted = case.batch_size
    if case.forward_mode == "EXTEND" and len(case.extend_lens) != wanted:
        raise case_error(
            name, f"key 'extend_lens' has {len(case.extend_lens)} entries for {wanted} requests"
        )
    if case.forward_mode != "EXTEND" and case.extend_lens:
        raise case_error(name, "key 'extend_lens' belongs to EXTEND alone")
    for key, values in (("prefix_lens", case.prefix_lens), ("seq_lens", case.seq_lens)):
        if values and len(values) != wanted:
            raise case_error(name, f"key {key!r} has {len(values)} entries for {wanted} requests")
    if case.forward_mode == "EXTEND" and case.seq_lens:
        raise case_error(name, "key 'seq_lens' follows from extend_lens and prefix_lens here")
    tokens = max((wanted * case.width, sum(case.extend_lens), *case.raw_counts))
    if tokens * case.width > MAX_TOKENS:
        raise case_error(
            name, f"it asks for {tokens * case.width} token rows; at most {MAX_TOKENS}"
        )


def _graph(raw: Any) -> GraphInput:
    if not isinstance(raw, dict):
        raise ValueError("must be an object with 'algo' and, if wanted, 'runners'")
    unknown = raw.keys() - {"algo", "runners"}
    if unknown:
        raise ValueError(f"has an unknown key {sorted(unknown)[0]!r}")
    runners = raw.get("runners", list(GRAPH_RUNNERS))
    if not isinstance(runners, list) or not runners:
        raise ValueError("needs a list of 'runners'")
    return GraphInput(
        algorithm=_one_of(ALGORITHMS)(raw.get("algo", "EAGLE")),
        runners=tuple(_one_of(GRAPH_RUNNERS)(runner) for runner in runners),
    )


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _present(value: Any) -> bool:
    """Present unless it is null or the text 'None'."""
    if value in (None, "None"):
        return False
    if value is True or value == "present":
        return True
    raise ValueError("must be null where the tensor is None, and left out otherwise")


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be an integer from {low} to {high}")
        return value

    return read


def _integers(low: int, high: int, most: int) -> Callable[[Any], tuple[int, ...]]:
    one = _integer(low, high)

    def read(value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or len(value) > most:
            raise ValueError(f"must be a list of at most {most} integers")
        return tuple(one(item) for item in value)

    return read


def _one_of(choices: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return read


def _optional(read: Callable[[Any], _Value]) -> Callable[[Any], _Value | None]:
    return lambda value: None if value is None else read(value)
