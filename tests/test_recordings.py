"""The shipped recordings: what their README says of them holds, and they are safe to ship."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from padtrace.contracts import forwards
from padtrace.contracts.engine import check
from padtrace.recording.model import Recording
from padtrace.recording.reader import read
from padtrace.sharing.check import share_check_file

FOLDER = Path(__file__).resolve().parent.parent / "recordings"
# `padtrace record` and `padtrace lab` put theirs beside them, named by the time.
FILES = [
    path
    for path in sorted(FOLDER.glob("*.safetensors"))
    if not re.match(r"\d{8}-\d{6}-", path.name)
]
README = (FOLDER / "README.md").read_text()


def recording(name: str) -> Recording:
    return read(FOLDER / f"{name}.safetensors")


def test_the_readme_lists_exactly_the_files_there_are() -> None:
    assert set(re.findall(r"^\| `([^`]+\.safetensors)`", README, re.M)) == {f.name for f in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_sample_can_be_shared(path: Path) -> None:
    assert path.stat().st_size < 400_000
    assert share_check_file(read(path), path).holds
    for word in (b"/root", b"/home", b"/tmp/", b"/opt/", b"/usr/", b"/var/"):
        assert word not in path.read_bytes(), word


def test_the_crash_is_diagnosed_from_the_file_alone() -> None:
    crash = recording("crash")
    assert crash.about["source"] == "server"
    assert crash.rows("process") == 4
    (group,) = [group for group in check(crash).groups if group.first.contract == "PT101"]
    finding = group.first
    # Warm-up sends one request; attention TP 2 pads its single draft row to 2.
    assert (finding.left.value, finding.right.value, finding.right.expected) == (2, 2, 3)
    assert finding.planned == "before the pad"
    assert finding.worker == "draft"
    assert "sglang#30296" in finding.known_reports
    messages = {event["message"] for event in crash.events() if event.kind == "error"}
    assert messages == {"num_splits must have shape (b+1)"}


@pytest.mark.parametrize(
    ("name", "ranks", "verdict", "judged", "nothing"),
    [
        ("healthy-dsa-eagle", 2, "clean", 222, {forwards.IDLE: 42, forwards.NO_ROWS: 4}),
        (
            "healthy-dsa-eagle-attention-tp-2", 4, "clean", 444,
            {forwards.IDLE: 84, forwards.NO_ROWS: 16},
        ),
        ("healthy-dense", 2, "nothing-observed", 0, {forwards.PLANS_NONE: 50}),
    ],
)  # fmt: skip
def test_a_healthy_server_gives_no_finding(
    name: str, ranks: int, verdict: str, judged: int, nothing: dict[str, int]
) -> None:
    healthy = recording(name)
    assert healthy.rows("process") == ranks
    report = check(healthy)
    assert report.findings == []
    assert report.verdict == verdict
    counted = report.forwards
    assert (counted.judged, counted.not_judged, counted.nothing_to_judge) == (judged, {}, nothing)
    assert judged + sum(nothing.values()) == healthy.rows("forward")
    modes = {event.text("forward_mode") for event in healthy.events() if event.kind == "forward"}
    assert "IDLE" in modes


@pytest.mark.parametrize("path", [f for f in FILES if f.name[0].isdigit()], ids=lambda f: f.stem)
def test_a_made_recording_holds_no_result(path: Path) -> None:
    made = read(path)
    assert made.about["source"] == "made"
    assert check(made).verdict == "nothing-observed"
