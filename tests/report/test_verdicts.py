"""First line, last line, exit code and JSON of every outcome say one thing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from padtrace import cli
from padtrace.contracts import forwards, num_splits
from padtrace.contracts.engine import check
from padtrace.explore import rerun
from padtrace.recording.model import Recording
from padtrace.recording.writer import write
from padtrace.report import verdicts
from tests.contracts.builders import BACKEND, Server, agreeing, batch, report_30296

DENSE = "TorchNativeAttnBackend"
EXIT = {"clean": 0, "divergent": 1, "nothing-observed": 5, "incomplete": 5, "not-reproduced": 6}


def forward(server: Server, number: int, **values: Any) -> dict[str, Any]:
    """One forward of its own batch, which ended."""
    own = {"batch": number, "forward": number}
    # What happens in it is added after it, and lies before its end.
    end = server._seq[values.get("rank", 0)] + 50
    defaults = {"forward_mode": "DECODE", "can_run_graph": 0, "failed": 0, "exit_seq": end}
    server.add("forward", **{**own, **defaults, **values})
    return own


def judged(server: Server, number: int = 0, rows: int = 4, splits: int = 5) -> None:
    """A decode whose call was recorded."""
    own = forward(server, number)
    raw = batch("DECODE", rows, rows)
    server.plan(splits - 1, raw, **own)
    server.add(
        "launch", function="flash_mla_with_kvcache", q__shape=[rows, 1, 64, 576],
        num_splits__rows=splits, **own,
    )  # fmt: skip


def beside(add: Callable[[Server], None], **server: Any) -> Recording:
    """A judged forward, and what `add` puts beside it."""
    made = Server(**server)
    judged(made)
    add(made)
    return made.finish()


def graph(server: Server) -> None:
    own = forward(server, 1, can_run_graph=1)
    server.plan(4, batch("DECODE", 4, 4), **own)


def graph_with_its_bucket(splits: int) -> Callable[[Server], None]:
    def add(server: Server) -> None:
        own = {"batch": 1}
        server.add(
            "plan", backend=BACKEND, function="init_forward_metadata_out_graph", graph_bucket=4,
            entry=batch("DECODE", 3, 3), num_splits__rows=splits, **own,
        )  # fmt: skip
        forward(server, 1, can_run_graph=1)

    return add


def without_plan(server: Server) -> None:
    facts = forward(server, 1, entry=batch("DECODE", 4, 4))
    assert facts


def dense(server: Server) -> None:
    own = forward(server, 1)
    server.add("plan", backend=DENSE, function="init_forward_metadata", **own)


def unknown_backend(server: Server) -> None:
    forward(server, 1)


def idle(server: Server) -> None:
    own = forward(server, 1, forward_mode="IDLE", entry=batch("IDLE", 0, 0))
    server.pad(batch("IDLE", 0, 0), batch("IDLE", 4, 4), **own)
    server.plan(4, batch("IDLE", 4, 4), **own)


def without_rows(server: Server) -> None:
    own = forward(server, 1, forward_mode="IDLE", entry=batch("IDLE", 0, 0))
    server.pad(batch("IDLE", 0, 0), batch("IDLE", 0, 0), **own)


def failed(server: Server) -> None:
    forward(server, 1, failed=1)


def never_ended(server: Server) -> None:
    from padtrace.recording.absent import Absent

    forward(server, 1, exit_seq=Absent.NOT_OBSERVED)


def no_call(server: Server) -> None:
    """A short prompt: its plan makes no num_splits, and another kernel does its attention."""
    own = forward(server, 1, forward_mode="EXTEND")
    server.add("plan", backend=BACKEND, function="init_forward_metadata", num_splits__rows=None,
               entry=batch("EXTEND", 9, 1), **own)  # fmt: skip


def call_without_splits(server: Server) -> None:
    own = forward(server, 1)
    server.add(
        "launch", function="flash_mla_with_kvcache", q__shape=[4, 1, 64, 576],
        num_splits__rows=None, **own,
    )  # fmt: skip


def call_unseen(server: Server) -> None:
    own = forward(server, 1)
    server.plan(4, batch("DECODE", 4, 4), **own)
    server.add("launch", function="flash_mla_with_kvcache", num_splits__rows=5, **own)


def padded_prefill(server: Server) -> None:
    """Nothing shows whether the layer cut q to the five real rows."""
    raw, padded = batch("EXTEND", 5, 1), batch("EXTEND", 12, 1)
    from padtrace.recording.absent import Absent

    own = forward(server, 1, forward_mode="EXTEND", exit_seq=Absent.NOT_OBSERVED)
    server.pad(raw, padded, **own)
    server.plan(12, padded, **own)


FACTS = {"workers": {"target": {"backend": BACKEND}}}
BESIDE: dict[str, tuple[Recording, dict[str, int], dict[str, int]]] = {
    "in a replayed graph": (beside(graph), {forwards.IN_GRAPH: 1}, {}),
    "in a graph whose bucket was planned": (beside(graph_with_its_bucket(5)), {}, {}),
    "no plan": (beside(without_plan, facts=FACTS), {num_splits.NO_PLAN: 1}, {}),
    "a dense backend": (beside(dense), {}, {forwards.PLANS_NONE: 1}),
    "an unknown backend": (beside(unknown_backend), {forwards.BACKEND_UNKNOWN: 1}, {}),
    "idle": (beside(idle, facts=FACTS), {}, {forwards.IDLE: 1}),
    "no rows": (beside(without_rows, facts=FACTS), {}, {forwards.NO_ROWS: 1}),
    "failed": (beside(failed, facts=FACTS), {forwards.FAILED: 1}, {}),
    "never ended": (beside(never_ended, facts=FACTS), {forwards.UNFINISHED: 1}, {}),
    "another kernel": (beside(no_call), {num_splits.NO_PLAN: 1}, {}),
    "a call without num_splits": (
        beside(call_without_splits, facts=FACTS), {}, {forwards.NO_SPLITS: 1},
    ),
    "a call that was not seen whole": (beside(call_unseen), {num_splits.ROWS_UNKNOWN: 1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_each_forward_is_judged_or_has_its_reason(name: str) -> None:
    recording, not_judged, nothing = BESIDE[name]
    report = check(recording)
    counted = report.forwards
    assert (counted.not_judged, counted.nothing_to_judge) == (not_judged, nothing)
    assert counted.judged == 2 - len(not_judged) - len(nothing)
    assert report.verdict == ("incomplete" if not_judged else "clean")


@pytest.mark.parametrize(
    ("release", "attn_cp", "reason"),
    [
        # RadixAttention hands padded rows on up to 0.5.20, and cuts them in 0.5.23.
        ("0.5.20", 1, None),
        ("0.5.23", 1, num_splits.Q_CUT),
        ("my-checkout", 1, num_splits.Q_CUT),
        # deepseek_v2 splits q among the context-parallel ranks.
        ("0.5.18", 4, num_splits.Q_SPLIT),
    ],
)
def test_a_prefill_without_a_recorded_call_is_judged_only_where_q_is_certain(
    release: str, attn_cp: int, reason: str | None
) -> None:
    server = Server(release=release, attn_cp=attn_cp)
    padded_prefill(server)
    report = check(server.finish())
    assert report.evaluated["PT101"] == (reason is None)
    assert report.skipped["PT101"] == ({reason: 1} if reason else {})


def lost() -> Recording:
    """Forwards 0 to 6 of one rank did not fit the ring, nor did some event of forward 8."""
    server = Server()
    server.builder.add_process({"global_rank": 1, "complete": 1, "dropped": 30}, {})
    judged(server, 7)
    recording = server.finish()
    recording.table("process").column("dropped")[0] = 30
    return recording


def test_forwards_that_the_ring_lost_are_counted_by_their_numbers() -> None:
    counted = check(lost()).forwards
    # Seven of the first rank; of the other at least one.
    assert counted.not_judged == {forwards.LOST: 8}


def test_ranks_without_a_file_are_not_clean() -> None:
    server = Server()
    judged(server)
    report = check(server.finish({"blind": {"missing_ranks": [1, 2]}}))
    assert (report.verdict, report.forwards.not_judged) == ("incomplete", {forwards.NO_FILE: 2})


def test_forwards_that_were_not_driven_are_never_part_of_a_clean() -> None:
    for not_driven, judged_left in (({}, 2), ({"two-batch overlap": 1}, 1)):
        server = Server()
        judged(server, 0)
        judged(server, 1)
        driven = {"driven": judged_left, "not_driven": not_driven}
        report = check(server.finish({"driven": driven}))
        assert report.forwards.judged == judged_left
        assert report.verdict == ("incomplete" if not_driven else "clean")
        assert list(report.forwards.not_judged) == [f"not driven: {r}" for r in not_driven]


def test_only_other_contracts_are_judged_by_their_places() -> None:
    recording, _, _ = BESIDE["in a replayed graph"]
    assert check(recording, {"PT101"}).verdict == "incomplete"
    assert check(recording, {"PT502"}).verdict == "nothing-observed"
    assert check(recording, {"PT701"}).verdict == "clean"


# Every outcome of a command that judges


def suspicious() -> Recording:
    server = Server()
    judged(server)
    raw = batch("DECODE", 4, 4)
    server.pad(raw, raw, scheduler_list_changed=1, batch=0, forward=0)
    return server.finish()


RECORDINGS: dict[str, tuple[Recording, str]] = {
    "clean": (agreeing(), "clean"),
    "suspect": (suspicious(), "clean"),
    "divergent": (report_30296(), "divergent"),
    "nothing": (Server(source="made").finish(), "nothing-observed"),
    "incomplete": (BESIDE["in a replayed graph"][0], "incomplete"),
    "two reasons": (
        beside(lambda server: (graph(server), forward(server, 2, failed=1)), facts=FACTS),
        "incomplete",
    ),
}  # fmt: skip


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Runs the command line; gives (exit code, stdout)."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["padtrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), capsys.readouterr().out

    return command


BEGINNINGS = {
    "clean": "clean",
    "nothing-observed": "nothing observed",
    "incomplete": ("nothing found in ", "incomplete: nothing found in "),
    "not-reproduced": "not reproduced",
    "divergent": ("num_splits ", "recorded: num_splits ", "divergent: "),
}


def agree(first: str, last: str, code: int, found: dict[str, Any], *, allowed: bool) -> None:
    """What every outcome must fulfil; `first` and `last` are lines of the text."""
    verdict = found["verdict"]
    expected = 0 if allowed and verdict == "incomplete" else EXIT[verdict]
    assert code == found["exit_code"] == expected
    for line in (first, last):
        assert line.startswith(BEGINNINGS[verdict]), line
        for other, beginnings in BEGINNINGS.items():
            assert other == verdict or not line.startswith(beginnings), (other, line)
        assert ("clean" in line.lower()) == (verdict == "clean")
    counted = found["coverage"]["forwards"]
    if verdict == "divergent":
        assert any(finding["severity"] != "suspect" for finding in found["findings"])
    if verdict == "clean":
        assert counted["judged"]
        assert not counted["not_judged"]
    if verdict == "incomplete":
        total = counted["judged"] + sum(counted["not_judged"].values())
        for line in (first, last):
            assert f"nothing found in {counted['judged']} of {total} forwards" in line
        assert counted["not_judged"]


@pytest.mark.parametrize("allowed", [False, True], ids=["", "allow-unjudged"])
@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("command", ["check", "diff"])
def test_text_json_and_exit_code_agree(
    run: Callable[..., tuple[int, str]], tmp_path: Path, command: str, name: str, allowed: bool
) -> None:
    recording, verdict = RECORDINGS[name]
    path = tmp_path / "x.safetensors"
    write(recording, path)
    flags = ["--allow-unjudged"] if allowed else []
    code, text = run(command, path, *flags)
    json_code, printed = run(command, path, "--json", *flags)
    found = json.loads(printed)
    assert (code, found["verdict"]) == (json_code, verdict)
    lines = text.splitlines()
    (last,) = [line for line in lines if line in _last_lines(recording)]
    agree(lines[0], last, code, found, allowed=allowed)


def _last_lines(recording: Recording) -> set[str]:
    return {verdicts.of_report(check(recording)).last}


# Replay: the same over recorded and driven values.


def served(rows: int, splits: int, *, fingerprint: str = "aa", source: str = "server") -> Recording:
    """One decode, its call recorded, on code of this fingerprint."""
    server = Server(source=source, facts={"fingerprints": {"sglang.pad": fingerprint}})
    judged(server, 0, rows, splits)
    return server.finish()


def driven(rows: int, splits: int, *, fingerprint: str = "aa", not_driven: int = 0) -> Recording:
    """The same as a replay gives it."""
    recording = served(rows, splits, fingerprint=fingerprint, source="replay")
    recording.about["sglang_source"] = "wheel"
    reasons = {"two-batch overlap": not_driven} if not_driven else {}
    recording.coverage["driven"] = {"driven": 1 - not_driven, "not_driven": reasons}
    return recording


GOOD, BAD, OTHER_GOOD, OTHER_BAD = (4, 5), (4, 4), (8, 9), (8, 4)
SAME, ANOTHER = "aa", "bb"
# recorded, driven, fingerprint of the driven code -> verdict, in the order of precedence.
REPLAYS: dict[str, tuple[Recording, Recording, str]] = {
    "a finding on recorded values comes first": (served(*BAD), driven(*GOOD), "divergent"),
    "and on both": (served(*BAD), driven(*BAD), "divergent"),
    "then not reproduced": (served(*GOOD), driven(*OTHER_GOOD), "not-reproduced"),
    "before a finding on driven values": (served(*GOOD), driven(*OTHER_BAD), "not-reproduced"),
    "other code": (
        served(*GOOD), driven(*OTHER_BAD, fingerprint=ANOTHER), "divergent",
    ),
    "other code that mends it": (served(*BAD), driven(*GOOD, fingerprint=ANOTHER), "clean"),
    "a made recording is never reproduced": (
        served(*GOOD, source="made"), driven(*OTHER_GOOD), "clean",
    ),
    "not driven": (served(*GOOD), driven(*GOOD, not_driven=1), "incomplete"),
    "driven alike": (served(*GOOD), driven(*GOOD), "clean"),
}  # fmt: skip


@pytest.mark.parametrize("allowed", [False, True], ids=["", "allow-unjudged"])
@pytest.mark.parametrize("name", REPLAYS)
def test_a_replay_says_one_thing_too(
    run: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    allowed: bool,
) -> None:
    recorded, replayed, verdict = REPLAYS[name]
    from padtrace.replay import service

    monkeypatch.setattr(service, "replay", lambda *args, **kwargs: replayed)
    path = tmp_path / "x.safetensors"
    write(recorded, path)
    flags = ["--allow-unjudged"] if allowed else []
    code, text = run("replay", path, *flags)
    json_code, printed = run("replay", path, "--json", *flags)
    found = json.loads(printed)
    assert (code, found["verdict"]) == (json_code, verdict)
    lines = [line for line in text.splitlines() if line]
    # The first line tells the recorded values, while SGLang loads: it is no verdict, and no clean.
    assert lines[0].startswith("recorded: ")
    assert "clean" not in lines[0]
    agree(lines[-1], lines[-1], code, found, allowed=allowed)
    (headline,) = [line for line in lines if line.startswith("replayed on SGLang")]
    assert headline.split(": ", 1)[1] == lines[-1]


def test_a_checkout_is_never_the_same_release() -> None:
    recorded, replayed = served(*GOOD), driven(*OTHER_GOOD)
    replayed.about["sglang_source"] = "checkout"
    assert rerun.judge(recorded, replayed).verdict == "clean"


def test_an_event_without_a_counterpart_is_not_reproduced() -> None:
    replayed = driven(*GOOD)
    recorded = served(*GOOD)
    assert rerun.judge(recorded, replayed).verdict == "clean"
    server = Server(source="server", facts={"fingerprints": {"sglang.pad": SAME}})
    judged(server)
    server.plan(4, batch("DECODE", 4, 4), batch=0, forward=0)
    outcome = rerun.judge(server.finish(), replayed)
    assert outcome.verdict == "not-reproduced"
    assert "1 plan only recorded" in verdicts.of_outcome(outcome).headline


def test_what_the_driver_compared_itself_decides() -> None:
    for different, verdict in ((0, "clean"), (2, "not-reproduced")):
        replayed = driven(*OTHER_GOOD)
        first = {"column": "pad.exit.input_ids.rows", "recorded": "4", "driven": "8"}
        replayed.coverage["driven"]["compared"] = {
            "different": different, "values": 9, "differences": [first][:different],
        }  # fmt: skip
        outcome = rerun.judge(served(*GOOD), replayed)
        assert outcome.verdict == verdict
        if different:
            assert verdicts.of_outcome(outcome).headline == (
                "not reproduced: 2 differences, first pad.exit.input_ids.rows: recorded 4, driven 8"
            )


def test_across_never_says_not_reproduced() -> None:
    recorded, replayed, _ = REPLAYS["then not reproduced"]
    assert rerun.judge(recorded, replayed, reproduce=False).verdict == "clean"
