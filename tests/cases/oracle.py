"""Holds replays against what was measured on the real functions of each release.

The measured values come from a harness that is no part of padtrace (see README.md here). A case is
replayed four times: planned before and after the pad, with the whole DSA backend and with the
function that pads its lengths alone, since the harness measured all four.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from padtrace.explore.make import make
from padtrace.recording.absent import Absent
from padtrace.recording.model import Event, Recording

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHARED = ROOT.parent / "shared" / "cases" / "cases.json"

PLANS = ("before", "after")

# Names of the harness that label how it measured; not results.
LABELS = {"entry", "cp", "msg", "replay_fn", "ours"}

_OWNERS = {
    "ext": "extend_seq_lens_cpu",
    "pre": "extend_prefix_lens_cpu",
    "logp": "extend_logprob_start_lens_cpu",
    "lora": "lora_ids",
}
_PLAN_ROWS = (
    "cache_seqlens_int32",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "dsa_cache_seqlens_int32",
    "dsa_cu_seqlens_q",
    "dsa_cu_seqlens_k",
    "dsa_seqlens_expanded",
    "dsa_extend_seq_lens_list",
    "token_to_batch_idx",
    "indexer_seq_lens",
    "topk_indices_offset",
    "num_splits",
)
_AGAINST_Q = ("page_table_1", "dsa_cache_seqlens_int32", "dsa_seqlens_expanded")


def load() -> dict[str, Any]:
    """The measured cases: PADTRACE_CASES, the shared file beside the checkout, or our copy."""
    stated = os.environ.get("PADTRACE_CASES")
    for path in [Path(stated)] if stated else [SHARED, HERE / "measured.json"]:
        if path.exists():
            opened: dict[str, Any] = json.loads(path.read_text())
            return opened
    raise FileNotFoundError(f"{stated} (PADTRACE_CASES) does not exist")


@dataclass
class Tally:
    """What was compared: the count, and every disagreement in words."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    cases: set[str] = field(default_factory=set)

    def check(self, where: str, expected: Any, actual: Any) -> None:
        self.compared += 1
        if expected != _plain(actual):
            self.wrong.append(f"{where}: measured {expected}, replayed {_plain(actual)}")


@dataclass
class Run:
    """The events of one case in one replay, by kind and in order."""

    events: dict[str, list[Event]]

    def one(self, kind: str, number: int = 0) -> Event | None:
        found = self.events.get(kind, [])
        return found[number] if number < len(found) else None

    def error(self, *functions: str) -> str | None:
        """Type of the error that left one of these functions."""
        for event in self.events.get("error", []):
            if any(str(event["function"]).startswith(name) for name in functions):
                return event.text("type")
        return None


def runs_of(recording: Recording) -> dict[str, Run]:
    """One run per case of a replayed recording."""
    by_place: dict[tuple[int, int], Run] = {}
    for event in recording.events():
        key = (event.integer("process") or 0, event.integer("batch") or 0)
        by_place.setdefault(key, Run({})).events.setdefault(event.kind, []).append(event)
    return {
        case["id"]: by_place.get((process, case["batch"]), Run({}))
        for process, facts in enumerate(recording.facts)
        for case in facts["case"]["cases"]
    }


def compare(
    cases: list[dict[str, Any]], release: str, replay: Callable[[Recording], Recording]
) -> Tally:
    """Replay every case on `release` and compare every measured value."""
    runs: dict[tuple[str, str], dict[str, Run]] = {}
    for plan in PLANS:
        for kind in ("backend", "alone"):
            made = make([_input(case, kind) for case in cases], plan=plan)  # type: ignore[arg-type]
            runs[plan, kind] = runs_of(replay(made))
    tally = Tally()
    for case in cases:
        mine = {key: of_cases[case["id"]] for key, of_cases in runs.items()}
        Comparison(case["id"], case["expected"][release], mine, tally).all()
        tally.cases.add(case["id"])
    return tally


def _input(case: dict[str, Any], kind: str) -> dict[str, Any]:
    given = dict(case["input"])
    if kind == "alone":
        given["no_dsa"] = True
    return {"id": case["id"], "input": given}


class Comparison:
    """One case on one release."""

    def __init__(
        self,
        case_id: str,
        expected: dict[str, Any],
        runs: dict[tuple[str, str], Run],
        tally: Tally,
    ) -> None:
        self.case_id = case_id
        self.expected = expected
        self.runs = runs
        self.tally = tally
        self.alone = runs["after", "alone"]
        self.early = runs["before", "alone"]

    def all(self) -> None:
        self._scale()
        self._raw()
        self._pad_only("plan_before", self.early)
        self._pad_only("plan_after", self.alone)
        self._pad()
        self._query()
        self._unpad()
        self._second_step()
        self._graph()
        for moment, plan in (("before", "before"), ("after", "after")):
            if moment in self.expected.get("dsa", {}):
                self._dsa(moment, self.runs[plan, "backend"])

    def check(self, path: str, expected: Any, actual: Any) -> None:
        self.tally.check(f"{self.case_id} {path}", expected, actual)

    def _scale(self) -> None:
        sync, expected = self.alone.one("sync"), self.expected["scale"]
        assert sync is not None
        self.check("scale.global_num_tokens", expected["global_num_tokens"], sync["counts_after"])
        self.check("scale.for_logprob", expected["for_logprob"], sync["logprob_counts_after"])
        self.check("scale.original", expected["original"], sync["original_counts"])
        self.check(
            "scale.aliases_scheduler_list",
            expected["aliases_scheduler_list"],
            bool(sync["aliases_scheduler_list"]),
        )

    def _raw(self) -> None:
        batch = self.alone.one("batch")
        assert batch is not None
        self._snapshot("raw", self.expected["raw"], batch.snapshot("exit"))

    def _snapshot(self, where: str, expected: dict[str, Any], snapshot: Any) -> None:
        for name, value in expected.items():
            found = _of_snapshot(snapshot, name)
            if found is not _NOT_IN_SNAPSHOT:
                self.check(f"{where}.{name}", value, found)

    def _pad_only(self, name: str, run: Run) -> None:
        expected = self.expected.get(name)
        if expected is None:
            return
        if "error" in expected:
            self.check(f"{name}.error", expected["error"], run.error("pad_"))
            return
        plan = run.one("plan")
        assert plan is not None, f"{self.case_id}: {name} was measured and not replayed"
        self.check(f"{name}.in_rows", expected["in_rows"], plan["dsa_seqlens_expanded.rows"])
        self.check(f"{name}.rows", expected["rows"], plan["planned.rows"])
        self.check(f"{name}.num_splits", expected["num_splits"], plan["num_splits.rows"])
        if "q_rows_local" in expected:
            self.check(f"{name}.q_rows_local", expected["q_rows_local"], _query_rows(run))

    def _pad(self) -> None:
        expected = self.expected["pad"]
        if "error" in expected:
            self.check("pad.error", expected["error"], self.alone.error("prepare_mlp"))
            return
        pad = self.alone.one("pad")
        assert pad is not None
        after, before = pad.snapshot("exit"), pad.snapshot("entry")
        assert after is not None
        assert before is not None
        self._snapshot("pad", expected, after)
        self.check("pad.dp_buffer_len", expected["dp_buffer_len"], after["global_dp_buffer_len"])
        self.check("pad.dp_padding_mode", expected["dp_padding_mode"], after["dp_padding_mode"])
        lengths = expected["seq_lens_values"]
        self.check("pad.seq_lens_values", [len(lengths), max(lengths, default=0), sum(lengths)], [
            after["seq_lens.rows"], after["seq_lens_cpu.max"], after["seq_lens_cpu.sum"],
        ])  # fmt: skip
        self.check(
            "pad.seq_lens_sum_true", expected["seq_lens_sum_true"], after["seq_lens_cpu.sum"]
        )
        self.check(
            "pad.extend_seq_lens_cpu_values",
            expected["extend_seq_lens_cpu_values"],
            after["extend_seq_lens_cpu"],
        )
        device = expected["extend_seq_lens_values"]
        self.check(
            "pad.extend_seq_lens_values",
            None if device is None else len(device),
            after["extend_seq_lens.rows"],
        )
        self.check(
            "pad.global_num_tokens_gpu",
            len(expected["global_num_tokens_gpu"]),
            after["global_num_tokens_gpu.rows"],
        )
        self.check(
            "pad.scheduler_list_mutated",
            expected["scheduler_list_mutated"],
            bool(pad["scheduler_list_changed"]),
        )
        sync = self.alone.one("sync")
        assert sync is not None
        if sync["draft_counts_before"] is None:
            self.check(
                "pad.scheduler_list",
                expected["scheduler_list"] != sync["counts_before"],
                bool(pad["scheduler_list_changed"]),
            )
        self.check("pad.owner_lists_mutated", expected["owner_lists_mutated"], _mutated(pad))

    def _query(self) -> None:
        if "q_rows" not in self.expected:
            return
        rows = self.expected["q_rows"]
        if "error" in self.expected["plan_after"]:
            self.check("q_rows", rows, _padded_rows(self.alone))
            return
        self.check("q_rows", rows, _query_rows(self.alone))
        for moment, run in (("before", self.early), ("after", self.alone)):
            if (
                f"match_{moment}" in self.expected
                and "error" not in self.expected[f"plan_{moment}"]
            ):
                plan = run.one("plan")
                assert plan is not None
                same = plan["planned.rows"] == _query_rows(self.alone)
                self.check(f"match_{moment}", self.expected[f"match_{moment}"], same)

    def _unpad(self) -> None:
        expected = self.expected.get("unpad")
        if expected is None:
            return
        # Where the harness could not plan, it went on to the unpad; a replay ends the batch.
        run = self.alone if self.alone.one("unpad") else self.runs["after", "backend"]
        if "error" in expected:
            self.check("unpad.error", expected["error"], run.error("post_forward"))
            return
        unpad, batch = run.one("unpad"), run.one("batch")
        if unpad is None:
            unpad, batch = self._unpad_without_plan()
        assert unpad is not None
        assert batch is not None
        after, made = unpad.snapshot("exit"), batch.snapshot("exit")
        self._snapshot("unpad", expected, after)
        self.check("unpad.logits_rows", expected["logits_rows"], unpad["logits_after.rows"])
        self.check(
            "unpad.logits_hidden_rows",
            expected["logits_hidden_rows"],
            unpad["hidden_states_after.rows"],
        )
        unrestored = []
        for name, restored in self.expected["restored"].items():
            same = _of_snapshot(after, name) == _of_snapshot(made, name)
            self.check(f"restored.{name}", restored, same)
            if not same:
                unrestored.append(name)
        self.check("not_restored", self.expected["not_restored"], sorted(unrestored))

    def _unpad_without_plan(self) -> tuple[Event | None, Event | None]:
        """Every late plan raised; the backend's early plan does not where CP is off by then."""
        run = self.runs["before", "backend"]
        return run.one("unpad"), run.one("batch")

    def _second_step(self) -> None:
        expected = self.expected.get("step2")
        if expected is None:
            return
        plan, pad = self.early.one("plan", 1), self.early.one("pad", 1)
        assert plan is not None
        assert pad is not None
        self.check("step2.rows", expected["plan_before"]["rows"], plan["planned.rows"])
        self.check(
            "step2.num_splits", expected["plan_before"]["num_splits"], plan["num_splits.rows"]
        )
        self.check(
            "step2.in_rows", expected["plan_before"]["in_rows"], plan["dsa_seqlens_expanded.rows"]
        )
        after = pad.snapshot("exit")
        assert after is not None
        self._snapshot("step2.pad", expected["pad"], after)
        self.check("step2.dp_padding_mode", expected["dp_padding_mode"], after["dp_padding_mode"])

    def _dsa(self, moment: str, run: Run) -> None:
        expected, where = self.expected["dsa"][moment], f"dsa.{moment}"
        if "error" in expected:
            error = run.error("init_forward_metadata", "prepare_mlp")
            self.check(f"{where}.error", expected["error"], error)
            return
        plan = run.one("plan")
        assert plan is not None, f"{self.case_id}: {where} was measured and not replayed"
        for name in _PLAN_ROWS:
            self.check(f"{where}.{name}", expected[name], plan[f"{name}.rows"])
        for name in ("page_table_1", "real_page_table"):
            self.check(
                f"{where}.{name}", expected[name], [plan[f"{name}.rows"], plan[f"{name}.width"]]
            )
        for name in ("max_seq_len_q", "max_seq_len_k", "seq_lens_sum"):
            self.check(f"{where}.{name}", expected[name], plan[name])
        if "paged_ctx_lens_2d" in expected:
            self.check(
                f"{where}.paged_ctx_lens_2d",
                expected["paged_ctx_lens_2d"][0],
                plan["paged_mqa_ctx_lens_2d.rows"],
            )
        self._dsa_against_query(expected, where, plan, run)

    def _dsa_against_query(
        self, expected: dict[str, Any], where: str, plan: Event, run: Run
    ) -> None:
        rows = _padded_rows(run) if where == "dsa.before" else _query_rows(run)
        self.check(f"{where}.q_rows", expected["q_rows"], rows)
        if "q_rows_full" in expected:
            self.check(f"{where}.q_rows_full", expected["q_rows_full"], _padded_rows(run))
        splits = plan.integer("num_splits.rows")
        assert splits is not None
        assert rows is not None
        self.check(f"{where}.num_splits_ok", expected["num_splits_ok"], splits == rows + 1)
        differ = [name for name in _AGAINST_Q if plan.integer(f"{name}.rows") != rows]
        self.check(f"{where}.rows_differ_from_q", expected["rows_differ_from_q"], differ)
        if "plan_list_changed_by_pad" in expected:
            self.check(
                f"{where}.plan_list_changed_by_pad",
                expected["plan_list_changed_by_pad"],
                _list_change(run.one("pad")),
            )

    def _graph(self) -> None:
        for runner, expected in self.expected.get("graph", {}).items():
            events = [event for event in self.alone.events["graph"] if event["runner"] == runner]
            judged, sized = events
            where = f"graph.{runner}"
            self.check(f"{where}.can_run", expected["can_run"], bool(judged["verdict"]))
            self.check(f"{where}.can_run_key", expected["can_run_key"], judged["bucket_argument"])
            self.check(f"{where}.replay_key", expected["replay_key"], sized["bucket_argument"])
            self.check(f"{where}.bucket", expected["bucket"], sized["bucket"])
            agree = judged["bucket_argument"] == sized["bucket_argument"]
            self.check(f"{where}.keys_agree", expected["keys_agree"], agree)


_NOT_IN_SNAPSHOT = object()
_ROW_FIELDS = {
    "input_ids", "positions", "out_cache_loc", "seq_lens", "seq_lens_cpu", "req_pool_indices",
    "extend_seq_lens", "extend_prefix_lens", "lora_ids",
}  # fmt: skip
_LIST_FIELDS = {
    "extend_seq_lens_cpu",
    "extend_prefix_lens_cpu",
    "extend_logprob_start_lens_cpu",
}
_SAME_FIELDS = {
    "batch_size",
    "seq_lens_sum",
    "extend_num_tokens",
    "forward_mode",
    "global_num_tokens_cpu",
}


def _of_snapshot(snapshot: Any, name: str) -> Any:
    """A snapshot's value under the name the harness gave it."""
    if name in _ROW_FIELDS:
        return snapshot[f"{name}.rows"]
    if name in _LIST_FIELDS:
        value = snapshot[name]
        return len(value) if isinstance(value, list) else value
    if name in _SAME_FIELDS:
        return snapshot[name]
    if name.startswith("spec."):
        return snapshot[f"spec_info.{name.removeprefix('spec.')}.rows"]
    return _NOT_IN_SNAPSHOT


def _query_rows(run: Run) -> int | None:
    """Rows of the attention call; without rows there is none."""
    launch = run.one("launch")
    if launch is None and _padded_rows(run) == 0:
        return 0
    shape = launch.vector("q.shape") if launch is not None else None
    return shape[0] if shape else None


def _padded_rows(run: Run) -> Any:
    pad = run.one("pad")
    after = pad.snapshot("exit") if pad is not None else None
    return None if after is None else after["input_ids.rows"]


def _mutated(pad: Event) -> list[str]:
    """The caller's lists that have another length after the pad than before."""
    before = pad.snapshot("entry")
    assert before is not None
    changed = []
    for label, name in _OWNERS.items():
        was, now = _of_snapshot(before, name), pad[f"owner.{name}.rows"]
        if not isinstance(now, Absent) and was != now:
            changed.append(label)
    return sorted(changed)


def _list_change(pad: Event | None) -> Any:
    before = pad.snapshot("entry") if pad is not None else None
    assert pad is not None
    assert before is not None
    was, now = _of_snapshot(before, "extend_seq_lens_cpu"), pad["owner.extend_seq_lens_cpu.rows"]
    return False if was == now else [was, now]


def _plain(value: Any) -> Any:
    if isinstance(value, Absent):
        return None if value is Absent.NO_ATTRIBUTE else value.value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def listed(wrong: list[str], most: int = 40) -> Iterator[str]:
    """The first disagreements, for an assertion's message."""
    yield from wrong[:most]
    if len(wrong) > most:
        yield f"... and {len(wrong) - most} more"
