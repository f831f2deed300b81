"""Holds replays against what was measured on the real functions of each release.

The measured values come from a harness that is no part of padtrace (see README.md here). It called
SGLang's functions one by one, and planned each case before and after the pad. A replay drives the
release's own path, which plans once: what was measured on that side of the pad is compared, and
what was measured on the other is counted as not on the path.
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
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

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

    def plan(self) -> Event | None:
        """The plan that the attention call read, or the first that has rows."""
        launch = self.attention()
        plans = [e for e in self.events.get("plan", []) if e.integer("num_splits.rows")]
        named = None if launch is None else launch.integer("plan_seq")
        return next((e for e in plans if e["enter_seq"] == named), plans[0] if plans else None)

    def attention(self) -> Event | None:
        """The first call of FlashMLA."""
        calls = self.events.get("launch", [])
        return next((e for e in calls if e["function"] == "flash_mla_with_kvcache"), None)

    def moment(self) -> str:
        """Whether the path planned before or after the pad."""
        plan, pad = self.plan(), self.one("pad")
        if plan is None or pad is None:
            return "after"
        early = (plan.integer("enter_seq") or 0) < (pad.integer("enter_seq") or 0)
        return "before" if early else "after"

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
    made = make([{"id": case["id"], "input": case["input"]} for case in cases])
    replayed = replay(made)
    runs = runs_of(replayed)
    tally = Tally()
    for reason, count in replayed.coverage["driven"]["not_driven"].items():
        tally.wrong.append(f"{count} forwards were not driven: {reason}")
    for case in cases:
        Comparison(case, case["expected"][release], runs[case["id"]], tally).all()
        tally.cases.add(case["id"])
    return tally


class Comparison:
    """One case on one release."""

    def __init__(
        self, case: dict[str, Any], expected: dict[str, Any], run: Run, tally: Tally
    ) -> None:
        self.case_id = case["id"]
        self.model_splits = case["input"].get("cp_mode") == "in-seq-split"
        self.no_dsa = bool(case["input"].get("no_dsa"))
        # Of a draft SGLang's path makes the speculative input itself.
        self.own_input = case["input"].get("spec") in ("draft", "draft_extend")
        self.expected = expected
        self.run = run
        self.tally = tally
        self.moment = run.moment()

    def all(self) -> None:
        self._scale()
        self._pad_only(f"plan_{self.moment}")
        self._pad()
        self._query()
        self._unpad()
        self._graph()
        if self.moment in self.expected.get("dsa", {}):
            self._dsa(self.moment)
        other = "after" if self.moment == "before" else "before"
        for name in (f"plan_{other}", f"dsa.{other}", "step2"):
            head, _, rest = name.partition(".")
            if head in self.expected and (not rest or rest in self.expected[head]):
                self.tally.leave_out(f"{name}: SGLang's path does not go there")

    def check(self, path: str, expected: Any, actual: Any) -> None:
        self.tally.check(f"{self.case_id} {path}", expected, actual)

    def _scale(self) -> None:
        sync, expected = self.run.one("sync"), self.expected["scale"]
        assert sync is not None
        self.check("scale.global_num_tokens", expected["global_num_tokens"], sync["counts_after"])
        if self.own_input:
            self.tally.leave_out("scale.for_logprob: the path states the logprob width itself")
        else:
            self.check("scale.for_logprob", expected["for_logprob"], sync["logprob_counts_after"])
        self.check("scale.original", expected["original"], sync["original_counts"])
        self.check(
            "scale.aliases_scheduler_list",
            expected["aliases_scheduler_list"],
            bool(sync["aliases_scheduler_list"]),
        )

    def _moved(self) -> tuple[int, int]:
        """What SGLang's path added to the lengths before the pad: to the longest, and in all.

        A draft extend moves them by its width after `init_new`; the harness called the pad alone.
        """
        batch, pad = self.run.one("batch"), self.run.one("pad")
        made = batch.snapshot("exit") if batch else None
        met = pad.snapshot("entry") if pad else None
        if made is None or met is None:
            return 0, 0
        longest, total = ((met[f"seq_lens_cpu.{n}"], made[f"seq_lens_cpu.{n}"]) for n in _LENGTHS)
        return longest[0] - longest[1], total[0] - total[1]

    def _snapshot(self, where: str, expected: dict[str, Any], snapshot: Any) -> None:
        total = self._moved()[1]
        for name, value in expected.items():
            found = _of_snapshot(snapshot, name)
            if name.startswith("spec.") and self.own_input:
                self.tally.leave_out("spec_info: the path makes the speculative input itself")
                continue
            if name == "seq_lens_sum" and isinstance(value, int):
                value += total
            if found is not _NOT_IN_SNAPSHOT:
                self.check(f"{where}.{name}", value, found)

    def _pad_only(self, name: str) -> None:
        expected, run = self.expected.get(name), self.run
        plan = run.plan()
        if expected is None:
            return
        if plan is None or "error" in expected:
            self._no_plan(name, expected)
            return
        if self.no_dsa:
            self.tally.leave_out(f"{name}: rows by the harness's reading, not the backend's")
            return
        self.check(f"{name}.in_rows", expected["in_rows"], plan["dsa_seqlens_expanded.rows"])
        self.check(f"{name}.rows", expected["rows"], plan["planned.rows"])
        self.check(f"{name}.num_splits", expected["num_splits"], plan["num_splits.rows"])
        if "q_rows_local" in expected:
            self.check(f"{name}.q_rows_local", expected["q_rows_local"], _query_rows(run))

    def _no_plan(self, name: str, expected: dict[str, Any]) -> None:
        """SGLang made no plan: it raised before, or plans no empty batch."""
        if _padded_rows(self.run) == 0:
            self.tally.leave_out(f"{name}: SGLang's runners plan no empty batch")
        elif "error" in expected and self.run.plan() is not None:
            self.tally.leave_out(f"{name}: the harness's own shard raised; the backend did not")
        elif "error" in expected:
            self.check(f"{name}.error", expected["error"], self.run.error(""))
        else:
            self.check(f"{name}", "a plan", "none")

    def _pad(self) -> None:
        expected = self.expected["pad"]
        if "error" in expected:
            self.check("pad.error", expected["error"], self.run.error("prepare_mlp"))
            return
        pad = self.run.one("pad")
        assert pad is not None
        after, before = pad.snapshot("exit"), pad.snapshot("entry")
        assert after is not None
        assert before is not None
        self._snapshot("pad", expected, after)
        self.check("pad.dp_buffer_len", expected["dp_buffer_len"], after["global_dp_buffer_len"])
        self.check("pad.dp_padding_mode", expected["dp_padding_mode"], after["dp_padding_mode"])
        lengths = expected["seq_lens_values"]
        longest, total = self._moved()
        wanted = [len(lengths), max(lengths, default=0) + longest, sum(lengths) + total]
        self.check("pad.seq_lens_values", wanted, [
            after["seq_lens.rows"], after["seq_lens_cpu.max"], after["seq_lens_cpu.sum"],
        ])  # fmt: skip
        self.check(
            "pad.seq_lens_sum_true",
            expected["seq_lens_sum_true"] + total,
            after["seq_lens_cpu.sum"],
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
        sync = self.run.one("sync")
        assert sync is not None
        if sync["draft_counts_before"] is None:
            self.check(
                "pad.scheduler_list",
                expected["scheduler_list"] != sync["counts_before"],
                bool(pad["scheduler_list_changed"]),
            )
        # The recorder looks at the batch's own lora list, the harness at the scheduler's.
        lists = [label for label in _mutated(pad) if label != "lora"]
        owned = [label for label in expected["owner_lists_mutated"] if label != "lora"]
        self.check("pad.owner_lists_mutated", owned, lists)

    def _query(self) -> None:
        if "q_rows" not in self.expected:
            return
        if self.model_splits:
            self.tally.leave_out("q_rows: the model's own split, which the harness did not call")
            return
        if "error" in self.expected.get("plan_after", {}) or self.no_dsa:
            self.tally.leave_out("q_rows: the harness took the padded rows, having no plan")
            return
        if _query_rows(self.run) is None:
            self.tally.leave_out("q_rows: SGLang's path raised, or an idle rank calls no attention")
            return
        self.check("q_rows", self.expected["q_rows"], _query_rows(self.run))
        name = f"match_{self.moment}"
        plan = self.run.plan()
        if name in self.expected and plan is not None:
            same = plan["planned.rows"] == _query_rows(self.run)
            self.check(name, self.expected[name], same)

    def _unpad(self) -> None:
        expected = self.expected.get("unpad")
        if expected is None:
            return
        run = self.run
        if "error" in expected:
            self.check("unpad.error", expected["error"], run.error("post_forward"))
            return
        unpad, batch = run.one("unpad"), run.one("batch")
        if unpad is None:
            # Where the harness could not plan it went on; SGLang's path ends there.
            assert run.error("") is not None, f"{self.case_id}: no unpad, and nothing raised"
            self.tally.leave_out("unpad: SGLang's path raised before it")
            return
        assert batch is not None
        after, made = unpad.snapshot("exit"), batch.snapshot("exit")
        if after is None:
            self.check("unpad.error", None, run.error(""))
            return
        skipped = self._changed_between() | self._own_fields()
        wanted = {name: value for name, value in expected.items() if name not in skipped}
        self._snapshot("unpad", wanted, after)
        self.check("unpad.logits_rows", expected["logits_rows"], unpad["logits_after.rows"])
        self.check(
            "unpad.logits_hidden_rows",
            expected["logits_hidden_rows"],
            unpad["hidden_states_after.rows"],
        )
        pad = self.run.one("pad")
        met = pad.snapshot("entry") if pad else None
        made = {**made, "seq_lens_sum": (met or made)["seq_lens_sum"]}
        unrestored = []
        for name, restored in self.expected["restored"].items():
            if name in skipped:
                continue
            same = _of_snapshot(after, name) == _of_snapshot(made, name)
            self.check(f"restored.{name}", restored, same)
            if not same:
                unrestored.append(name)
        measured = [name for name in self.expected["not_restored"] if name not in skipped]
        self.check("not_restored", measured, sorted(unrestored))

    def _changed_between(self) -> set[str]:
        """What the path changes between pad and unpad; the harness called nothing there.

        The plan of 0.5.12 gives a verify lengths of its own.
        """
        pad, unpad = self.run.one("pad"), self.run.one("unpad")
        before = pad.snapshot("exit") if pad else None
        after = unpad.snapshot("entry") if unpad else None
        if before is None or after is None:
            return set()
        names = self.expected["restored"]
        changed = {
            name for name in names if _of_snapshot(before, name) != _of_snapshot(after, name)
        }
        for name in changed:
            self.tally.leave_out(f"{name}: the path changes it between pad and unpad")
        return changed

    def _own_fields(self) -> set[str]:
        if not self.own_input:
            return set()
        return {name for name in self.expected["restored"] if name.startswith("spec.")}

    def _dsa(self, moment: str) -> None:
        expected, where = self.expected["dsa"][moment], f"dsa.{moment}"
        plan = self.run.plan()
        if plan is None:
            self._no_plan(where, expected)
            return
        if "error" in expected:
            self.check(f"{where}.error", expected["error"], self.run.error(""))
            return
        for name in _PLAN_ROWS:
            self.check(f"{where}.{name}", expected[name], plan[f"{name}.rows"])
        longest, _ = self._moved()
        rows, width = expected["page_table_1"]
        found = [plan["page_table_1.rows"], plan["page_table_1.width"]]
        self.check(f"{where}.page_table_1", [rows, width + longest], found)
        if not longest:
            found = [plan["real_page_table.rows"], plan["real_page_table.width"]]
            self.check(f"{where}.real_page_table", expected["real_page_table"], found)
        self.check(f"{where}.max_seq_len_q", expected["max_seq_len_q"], plan["max_seq_len_q"])
        self.check(
            f"{where}.max_seq_len_k", expected["max_seq_len_k"] + longest, plan["max_seq_len_k"]
        )
        wanted = expected["seq_lens_sum"]
        self.check(
            f"{where}.seq_lens_sum",
            wanted if wanted is None else wanted + self._moved()[1],
            plan["seq_lens_sum"],
        )
        if expected.get("paged_ctx_lens_2d") is not None:
            self.tally.leave_out("paged_ctx_lens_2d: the backend builds them for a card alone")
        self._dsa_against_query(expected, where, plan)

    def _dsa_against_query(self, expected: dict[str, Any], where: str, plan: Event) -> None:
        run = self.run
        rows = _query_rows(run)
        if rows is None or self.model_splits:
            return
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
            events = [event for event in self.run.events["graph"] if event["runner"] == runner]
            judged, sized = events
            where = f"graph.{runner}"
            self.check(f"{where}.can_run", expected["can_run"], bool(judged["verdict"]))
            self.check(f"{where}.can_run_key", expected["can_run_key"], judged["bucket_argument"])
            self.check(f"{where}.replay_key", expected["replay_key"], sized["bucket_argument"])
            self.check(f"{where}.bucket", expected["bucket"], sized["bucket"])
            agree = judged["bucket_argument"] == sized["bucket_argument"]
            self.check(f"{where}.keys_agree", expected["keys_agree"], agree)


_LENGTHS = ("max", "sum")
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
    launch = run.attention()
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
