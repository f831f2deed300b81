"""Holds the replay of one checkout of padtrace against another's, over random configurations.

    git worktree add ../before 853b184
    python scripts/compare_replays.py --before ../before --count 400 0.5.16 0.5.18 0.5.20 0.5.23

Made for the change from calling SGLang's pieces one by one to driving its own path. Each kind of
difference must be explained by a line of SGLang (`EXPLAINED`); others are listed, and the exit
code is 1. The result of one run is kept in docs/driver.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent

Rows = dict[str, Any]

# Run in a process of its own for each checkout, since both are called padtrace.
_READ = """
import json, sys
from padtrace.explore.make import make
from padtrace.replay import service
cases = json.load(open(sys.argv[1]))
found = {}
for first in range(0, len(cases), 50):
    part = cases[first : first + 50]
    replayed = service.replay(make(part), sglang=sys.argv[2], kernels="off", jobs=1)
    names = {}
    for process, facts in enumerate(replayed.facts):
        for one in facts["case"]["cases"]:
            names[process, one["batch"]] = one["id"]
    for event in replayed.events():
        name = names.get((event["process"], event["batch"]))
        if name is None:
            continue
        empty = {"pads": [], "plans": [], "q": [], "unpads": [], "error": None}
        rows = found.setdefault(name, empty)
        if event.kind == "pad" and event["function"] == "prepare_mlp_sync_batch":
            after = event.snapshot("exit")
            if after is not None:
                rows["pads"].append([after["input_ids.rows"], after["batch_size"]])
        elif event.kind == "plan" and event.integer("planned.rows") is not None:
            if "MultiStep" not in str(event["backend"]):
                rows["plans"].append([event["planned.rows"], event["num_splits.rows"]])
        elif event.kind == "launch" and event["function"] == "flash_mla_with_kvcache":
            shape = event.vector("q.shape")
            rows["q"].append([shape[0] if shape else None, event.integer("num_splits.rows")])
        elif event.kind == "unpad":
            rows["unpads"].append(event.integer("logits_after.rows"))
        elif event.kind == "error":
            rows["error"] = event["type"]
json.dump(found, open(sys.argv[3], "w"))
"""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    cases = random_cases(options.count, options.seed)
    unexplained = 0
    for release in options.releases:
        before, after = (rows_of(path, cases, release) for path in (options.before, HERE))
        told: Counter[str] = Counter()
        equal = 0
        for case in cases:
            kinds = differences(case["input"], before.get(case["id"]), after.get(case["id"]))
            equal += not kinds
            for kind in kinds:
                told[kind] += 1
                if kind.startswith("unexplained"):
                    unexplained += 1
                    print(f"  {case['input']}\n    before {before.get(case['id'])}")
                    print(f"    after  {after.get(case['id'])}")
        print(f"{release}: {equal} of {len(cases)} configurations alike")
        for kind, count in told.most_common():
            print(f"  {count:4}  {kind}")
    return 1 if unexplained else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("releases", nargs="+", help="releases that are here")
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=11)
    return parser.parse_args(arguments)


def rows_of(checkout: Path, cases: list[dict[str, Any]], release: str) -> dict[str, Rows]:
    """What the padtrace of a checkout replays of each case."""
    with tempfile.TemporaryDirectory() as name:
        given, found = Path(name) / "cases.json", Path(name) / "rows.json"
        given.write_text(json.dumps(cases))
        subprocess.run(
            [sys.executable, "-c", _READ, str(given), release, str(found)],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            cwd=name,
            check=True,
        )
        read: dict[str, Rows] = json.loads(found.read_text())
        return read


# --- the configurations ---------------------------------------------------------------------------


def random_cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Configurations of every mode, each possible on a server."""
    chance = random.Random(seed)
    return [{"id": f"random-{n}", "input": _random_case(chance)} for n in range(count)]


def _random_case(chance: random.Random) -> dict[str, Any]:
    mode = chance.choice(["EXTEND", "DECODE", "draft", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "IDLE"])
    attn_dp = chance.choice([1, 1, 2, 4])
    case: dict[str, Any] = {
        "attn_tp": chance.choice([1, 2, 4, 8]),
        "attn_dp": attn_dp,
        "bs": [chance.randint(1, 9) for _ in range(attn_dp)],
    }
    if attn_dp == 1 and mode in ("EXTEND", "TARGET_VERIFY") and chance.random() < 0.25:
        case.update(attn_cp=chance.choice([2, 4]), cp_v2=chance.random() < 0.5)
    width = chance.randint(2, 7)
    if mode == "EXTEND":
        lengths = [chance.randint(1, 40) for _ in range(case["bs"][0])]
        case.update(forward_mode="EXTEND", extend_lens=lengths)
    elif mode == "draft":
        case.update(forward_mode="DECODE", spec="draft", steps=chance.randint(1, 3))
    elif mode == "IDLE":
        case["bs"][0] = 0
        spec = chance.choice([None, "verify", "draft", "draft_extend"])
        case.update(forward_mode="IDLE", spec=spec)
        if spec in ("verify", "draft_extend"):
            case["width"] = width
    else:
        case["forward_mode"] = mode
        if mode != "DECODE":
            spec = "verify" if mode == "TARGET_VERIFY" else "draft_extend"
            case.update(spec=spec, width=width)
    return case


# --- the differences ------------------------------------------------------------------------------


def _is(case: Rows, *modes: str) -> bool:
    return case["forward_mode"] in modes


def _cut(case: Rows, before: Rows, after: Rows) -> bool:
    return _is(case, "EXTEND") and [row[0] for row in after["q"]] == [sum(case["extend_lens"])]


def _all_steps_planned_first(case: Rows, before: Rows, after: Rows) -> bool:
    return case.get("spec") == "draft" and case.get("steps", 1) > 1


def _idle(case: Rows, before: Rows, after: Rows) -> bool:
    return _is(case, "IDLE")


def _split_by_the_model(case: Rows, before: Rows, after: Rows) -> bool:
    return _is(case, "EXTEND") and case.get("attn_cp", 1) > 1


# By what is different, in order; the words name the line of SGLang that makes it so.
EXPLAINED: list[tuple[tuple[str, ...], Callable[[Rows, Rows, Rows], bool], str]] = [
    (
        ("q",),
        _cut,
        "RadixAttention cuts q to the real rows (layers/attention/graph_utils.py,"
        " padded_extend_real_tokens); the pieces took the padded ones",
    ),
    (
        ("plans", "pads", "q", "unpads", "error"),
        _all_steps_planned_first,
        "the multi-step backend plans every step before the first"
        " (speculative/eagle_worker_v2.py, draft); the pieces planned before each",
    ),
    (
        ("plans", "pads", "q", "unpads", "error"),
        _idle,
        "an idle rank is planned after the pad, and its model calls no attention without rows or"
        " in idle mode (runner/eager_runner.py, _execute_idle)",
    ),
    (
        ("plans", "q", "pads", "unpads", "error"),
        _split_by_the_model,
        "prefill context parallelism is prepared by the eager runner or split by the model"
        " (models/deepseek_v2.py, cp_split_and_rebuild_data)",
    ),
]


def differences(case: Rows, before: Rows | None, after: Rows | None) -> list[str]:
    """The kinds of difference of one configuration, each once."""
    if before is None or after is None:
        return ["unexplained: one of them replayed nothing"]
    names = ("pads", "plans", "q", "unpads", "error")
    fields = [name for name in names if before[name] != after[name]]
    found: dict[str, None] = {}
    for name in fields:
        for names, holds, words in EXPLAINED:
            if name in names and holds(case, before, after):
                found[words] = None
                break
        else:
            found[f"unexplained: {name}"] = None
    return list(found)


if __name__ == "__main__":
    raise SystemExit(main())
