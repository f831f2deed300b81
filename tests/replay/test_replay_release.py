"""Replays on a real release: verdicts, chains, errors, edits; a release that lacks something."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from padtrace.contracts.evidence import Evidence
from padtrace.errors import BadRecordingError, EnvironmentMissingError
from padtrace.explore.make import make
from padtrace.recording import schema
from padtrace.recording.absent import Absent
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.model import Event, Recording
from padtrace.recording.reader import read
from padtrace.replay import releases, service
from padtrace.report.summary import releases as releases_of

pytestmark = pytest.mark.release

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
VERSION = "0.5.18"
CRASH = {
    "forward_mode": "DRAFT_EXTEND_V2", "spec": "draft_extend", "width": 6, "bs": [1], "attn_tp": 8,
}  # fmt: skip
CP_VERIFY = {
    "forward_mode": "TARGET_VERIFY", "spec": "verify", "width": 6, "bs": [1], "attn_cp": 8,
    "cp_v2": True,
}  # fmt: skip
UNEVEN = {
    "forward_mode": "DRAFT_EXTEND_V2", "spec": "draft_extend", "width": 4, "bs": [1, 3],
    "attn_tp": 2, "attn_dp": 2,
}  # fmt: skip
NONE_HIDDEN = {
    "forward_mode": "DECODE", "spec": "draft", "bs": [3], "attn_tp": 2, "hidden_states": None,
}  # fmt: skip

BESIDE_A_PREFILL = {
    "forward_mode": "TARGET_VERIFY", "spec": "verify", "width": 6, "bs": [1, 1], "attn_dp": 2,
    "raw_counts": [6, 40], "is_extend_in_batch": True,
}  # fmt: skip
COORDINATED = "dp_spec_prefill_coordination_applied"


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    service.close()


def _root(version: str) -> Path:
    root = releases.here(version)
    if root is None:
        pytest.skip(f"SGLang {version} is not here: padtrace releases fetch {version}")
    return root


def _replay(case: Any, version: str = VERSION, **options: Any) -> Recording:
    _root(version)
    options.setdefault("kernels", "off")
    return service.replay(make(case), sglang=version, **options)


def _events(recording: Recording, kind: str) -> list[Event]:
    return [event for event in recording.events() if event.kind == kind]


def _rows(recording: Recording) -> tuple[int, Any]:
    launch = _attention(recording)
    shape = launch.vector("q.shape")
    assert shape is not None
    return shape[0], launch["num_splits.rows"]


def _attention(recording: Recording) -> Event:
    """The one call of FlashMLA."""
    (launch,) = [
        event
        for event in _events(recording, "launch")
        if event["function"] == "flash_mla_with_kvcache"
    ]
    return launch


@pytest.mark.parametrize(
    ("case", "version", "rows"),
    [
        # PR #34443, before and after: the plan was aligned to CP where q was not.
        (CP_VERIFY, "0.5.17", (6, 9)),
        (CP_VERIFY, "0.5.18", (6, 7)),
        # sglang#30296: planned before the pad, one row short of nothing but the alignment.
        (CRASH, "0.5.16", (8, 7)),
        (CRASH, "0.5.18", (8, 7)),
    ],
)
def test_rows_of_public_reports(case: Any, version: str, rows: tuple[int, int]) -> None:
    assert _rows(_replay(case, version)) == rows


def test_each_length_tells_how_it_came_about() -> None:
    replayed = _replay(CRASH)
    texts, keys = replayed.about["chain_texts"], replayed.about["chains"]
    chains = {key.rsplit("/", 1)[1]: texts[index] for key, index in keys.items()}
    assert chains["q.rows"] == [
        "1", "x num_tokens_per_req=6 -> 6", "ceil_align(attn_tp=8) -> 8",
    ]  # fmt: skip
    assert chains["num_splits.rows"] == [
        "1", "x num_tokens_per_req=6 -> 6", "planned before the pad -> 6",
        "num_splits: rows + 1 -> 7",
    ]  # fmt: skip
    assert _replay(CRASH, chains=False).about["chain_texts"] == []


def test_the_reference_kernel_refuses_in_the_kernels_words() -> None:
    replayed = _replay(CRASH, kernels="reference")
    (error,) = _events(replayed, "error")
    assert error["message"] == "num_splits must have shape (b+1)"
    launch = _attention(replayed)
    assert launch["failed"] == 1
    assert error["parent"] == launch["enter_seq"]
    # Nothing is replayed that a dead server would not have done.
    assert _events(replayed, "unpad") == []


def test_an_error_of_sglang_ends_its_batch_and_no_other() -> None:
    replayed = _replay([NONE_HIDDEN, {**NONE_HIDDEN, "hidden_states": "present"}])
    (error,) = _events(replayed, "error")
    assert error["type"] == "AttributeError"
    assert error["function"] == "post_forward_mlp_sync_batch"
    frames = error["frames"]
    assert isinstance(frames, list)
    assert str(frames[-1]).startswith("sglang/srt/model_executor/forward_batch_info.py:")
    assert error["batch"] == 0
    assert [event["batch"] for event in _events(replayed, "unpad")] == [0, 1]
    failed = [event["failed"] for event in _events(replayed, "forward")]
    assert failed == [1, 0]


def test_equal_batches_run_once_and_are_counted() -> None:
    replayed = _replay([CRASH, UNEVEN, CRASH, CRASH])
    assert replayed.coverage["replay"]["equal_inputs"] == 2
    rows = [event["num_splits.rows"] for event in _events(replayed, "plan")]
    assert rows[:3] == [7, 7, 7]
    assert len(_events(replayed, "unpad")) == 4


def test_a_replay_of_a_replay_changes_nothing() -> None:
    once = _replay([CRASH, CP_VERIFY, UNEVEN, NONE_HIDDEN])
    twice = service.replay(once, kernels="off")
    assert twice.coverage["replay"]["outside_edits"] == 0
    for left, right in zip(once.events(), twice.events(), strict=True):
        assert left.values == right.values


def _rewritten(recording: Recording, change: Any) -> Recording:
    """A copy in which `change(kind, values)` has edited the events."""
    builder = RecordingBuilder(recording.about)
    for process in range(recording.rows("process")):
        builder.add_process(recording.process(process), recording.facts[process])
    for event in recording.events():
        values = dict(event.values)
        change(event.kind, values)
        builder.add_event(event.kind, values)
    return builder.finish(recording.coverage)


def test_what_the_path_does_not_do_is_not_reproduced_and_is_listed() -> None:
    """A server whose worker cut the positions of a padded batch before the unpad."""

    def cut(kind: str, values: dict[str, Any]) -> None:
        if kind == "unpad":
            values["entry"] = {**values["entry"], "positions.rows": 5, "seq_lens_sum": 77}

    replayed = service.replay(_rewritten(_replay(CRASH), cut), kernels="off")
    compared = replayed.coverage["driven"]["compared"]
    (unpad,) = _events(replayed, "unpad")
    entry = unpad.snapshot("entry")
    assert entry is not None
    assert entry["positions.rows"] == 8
    assert compared["different"] == 2
    listed = sorted((one["column"], one["recorded"]) for one in compared["differences"])
    assert listed == [
        ("unpad.entry.positions.rows", "5"),
        ("unpad.entry.seq_lens_sum", "77"),
    ]


@pytest.mark.parametrize(
    ("applied", "counts", "padding"),
    [
        # One verify of 6 rows beside a prefill of 40 tokens. The plan of 0.5.23 states the rows of
        # this phase and keeps every rank's mode; other counts are requests, 6 rows each.
        (1, [6, 40], "SUM_LEN"),
        (0, [36, 240], None),
        (Absent.NOT_OBSERVED, [36, 240], None),  # recorded by an earlier padtrace
    ],
)
def test_counts_of_a_coordinated_step_are_not_scaled(
    applied: Any, counts: list[int], padding: str | None
) -> None:
    def coordinate(kind: str, values: dict[str, Any]) -> None:
        if kind == "batch":
            values["exit"] = {**values["exit"], COORDINATED: applied}

    _root("0.5.23")
    made = _rewritten(make(BESIDE_A_PREFILL), coordinate)
    replayed = service.replay(made, sglang="0.5.23", kernels="off")
    (sync,) = _events(replayed, "sync")
    (pad,) = _events(replayed, "pad")
    after = pad.snapshot("exit")
    assert sync.vector("counts_after") == counts
    assert after is not None
    assert after[COORDINATED] == (1 if applied == 1 else 0)
    if padding is not None:
        assert after["dp_padding_mode"] == padding


def test_another_release_keeps_its_own_rows() -> None:
    """Recorded on 0.5.17, whose plan is too long; 0.5.18 plans right, and that is no edit."""
    recorded = _replay(CP_VERIFY, "0.5.17")
    replayed = service.replay(recorded, sglang=VERSION, kernels="off")
    assert _rows(replayed) == (6, 7)
    assert replayed.coverage["replay"]["outside_edits"] == 0
    assert replayed.about["recorded_on"] == "0.5.17"


def test_a_replay_names_the_release_that_made_its_rows() -> None:
    # Recorded on 0.5.18, whose name is in the facts of every process as well.
    recording = read(RECORDINGS / "crash.safetensors")
    assert releases_of(recording) == ["0.5.18"]
    _root("0.5.17")
    replayed = service.replay(recording, sglang="0.5.17", kernels="off")
    assert releases_of(replayed) == ["0.5.17"]
    assert replayed.about["recorded_on"] == "0.5.18"
    # Contracts look there for what a release tolerates, and which reports it is known for.
    evidence = Evidence(replayed)
    assert [evidence.facts(process).sglang.version for process in range(4)] == ["0.5.17"] * 4


def test_a_field_that_was_not_recorded_names_sglangs_line() -> None:
    def forget(kind: str, values: dict[str, Any]) -> None:
        if kind == "batch":
            values["exit"] = {**values["exit"], "extend_seq_lens_cpu": Absent.NOT_OBSERVED}

    recording = _rewritten(make(CRASH), forget)
    _root(VERSION)
    replayed = service.replay(recording, sglang=VERSION, kernels="off")
    driven = replayed.coverage["driven"]
    assert driven["driven"] == 0
    ((reason, count),) = driven["not_driven"].items()
    assert count == 1
    assert "forward_batch.extend_seq_lens_cpu" in reason
    assert "sglang/srt/layers/attention/dsa_backend.py:" in reason
    # What was recorded is all that is left, and a made recording holds no launch's rows.
    assert _attention(replayed)["num_splits.rows"] is Absent.NOT_OBSERVED


@pytest.mark.parametrize("name", ["dataclass", "logging", "SpecInputType", "__builtins__", "x.y"])
def test_a_recording_names_speculative_inputs_and_nothing_else_of_sglang(name: str) -> None:
    """These are there in the module of the inputs, and the first could even be called."""

    def rename(kind: str, values: dict[str, Any]) -> None:
        for part in ("entry", "exit"):
            if isinstance(values.get(part), dict):
                values[part] = {**values[part], "spec_info": name}

    _root(VERSION)
    with pytest.raises(EnvironmentMissingError, match="speculative input"):
        service.replay(_rewritten(make(CRASH), rename), sglang=VERSION, kernels="off")


@pytest.mark.parametrize("name", ["torch.load", "compile", "torch.no.such", "", "torch.nn"])
def test_a_recording_names_dtypes_and_nothing_else_of_torch(name: str) -> None:
    recording = make(CRASH)
    for facts in recording.facts:
        for worker in facts["workers"].values():
            worker["kv_cache_dtype"] = name or "."
    _root(VERSION)
    with pytest.raises(BadRecordingError, match="dtype"):
        service.replay(recording, sglang=VERSION, kernels="off")


def _mutilated(root: Path, target: Path, file: str, old: str, new: str) -> Path:
    """A copy of a release (by links) with one name changed in one file."""
    shutil.copytree(root / "sglang", target / "sglang", copy_function=os.symlink)
    changed = target / "sglang" / file
    text = changed.read_text()
    assert old in text
    changed.unlink()
    changed.write_text(text.replace(old, new))
    return target


@pytest.mark.parametrize(
    ("file", "old", "capability"),
    [
        ("srt/model_executor/forward_batch_info.py", "def prepare_mlp_sync_batch", "'pad'"),
        (
            "srt/model_executor/forward_batch_info.py",
            "def init_mlp_sync_metadata",
            "'spec scaling'",
        ),
        ("srt/layers/attention/dsa_backend.py", "def _compute_flashmla_metadata", "'DSA planning'"),
    ],
)
def test_a_release_that_lacks_a_function_gives_no_verdict(
    tmp_path: Path, file: str, old: str, capability: str
) -> None:
    root = _mutilated(_root(VERSION), tmp_path, file, old, old.replace("def ", "def renamed_"))
    with pytest.raises(EnvironmentMissingError) as caught:
        service.replay(make(CRASH), sglang=root, kernels="off")
    service.close()
    assert caught.value.exit_code == 4
    assert capability in caught.value.what
    assert str(root) in caught.value.what


def test_doctor_says_what_serves_each_capability() -> None:
    _root(VERSION)
    doctor = service.doctor(VERSION)
    assert doctor.version == VERSION
    assert doctor.capabilities["pad"] == "ForwardBatch.prepare_mlp_sync_batch"
    assert None not in doctor.capabilities.values()


def test_every_column_of_a_replayed_event_is_of_the_schema() -> None:
    replayed = _replay([CRASH, CP_VERIFY])
    for event in replayed.events():
        assert set(event.values) == {column.name for column in schema.event_columns(event.kind)}
    (plan, _) = _events(replayed, "plan")
    unseen = [name for name, value in plan.values.items() if value is Absent.NOT_OBSERVED]
    assert set(unseen) <= {
        "parent", "forward", "t_ns", "graph_bucket", "num_splits_slice.rows",
        "num_splits_slice.wanted",
    }  # fmt: skip
