"""Several workers give together what one gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from padtrace.errors import EnvironmentMissingError
from padtrace.explore.make import make
from padtrace.recording.joining import join
from padtrace.recording.model import Recording
from padtrace.recording.reader import read
from padtrace.replay import environments, releases, service, shares

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"


def of_processes(count: int, forwards: int) -> Recording:
    """A made recording with so many processes of so many forwards each."""
    case = {"forward_mode": "DECODE", "bs": [2], "attn_tp": 2}
    return join([make([case] * forwards)] * count)


@pytest.mark.parametrize(
    ("processes", "jobs", "expected"),
    [
        (1, 8, [(0, 1)]),
        (4, 1, [(0, 4)]),
        (4, 2, [(0, 2), (2, 4)]),
        (5, 2, [(0, 2), (2, 5)]),
        (3, 8, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_every_process_is_in_one_share(
    processes: int, jobs: int, expected: list[tuple[int, int]]
) -> None:
    assert shares.shares(of_processes(processes, 1), jobs) == expected


def test_a_short_recording_is_not_worth_a_second_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert shares.shares(of_processes(4, 10), None) == [(0, 4)]
    monkeypatch.setattr(shares, "_FORWARDS_PER_WORKER", 20)
    # 40 forwards pay for a second and a third worker.
    assert len(shares.shares(of_processes(4, 10), None)) == 3


def content(recording: Recording) -> dict[str, Any]:
    about = dict(recording.about)
    texts = about.pop("chain_texts")
    chains = {key: texts[index] for key, index in about.pop("chains").items()}
    events = sorted((e.kind, repr(sorted(e.values.items(), key=str))) for e in recording.events())
    return {"about": about, "chains": chains, "events": events, "facts": recording.facts}


@pytest.mark.release
@pytest.mark.skipif(
    bool(environments.missing_packages()), reason="this interpreter lacks what SGLang imports"
)
@pytest.mark.parametrize("name", ["crash", "healthy-dense", "healthy-dsa-eagle"])
def test_two_workers_give_what_one_gives(name: str) -> None:
    recording = read(RECORDINGS / f"{name}.safetensors")
    release = str(recording.about["sglang"])
    if releases.here(release) is None:
        pytest.skip(f"SGLang {release} is not here: padtrace releases fetch {release}")
    assert recording.rows("process") > 1
    alone, together = (service.replay(recording, kernels="reference", jobs=jobs) for jobs in (1, 2))
    assert content(together) == content(alone)
    assert together.coverage == alone.coverage
    assert [together.process(i) for i in range(together.rows("process"))] == [
        alone.process(i) for i in range(alone.rows("process"))
    ]


def test_a_share_that_fails_is_the_error_of_the_whole(tmp_path: Path) -> None:
    place = tmp_path / "sglang" / "srt" / "model_executor"
    place.mkdir(parents=True)
    for folder in (place, place.parent, place.parent.parent):
        (folder / "__init__.py").write_text("__version__ = '9.9.9'\n")
    (place / "forward_batch_info.py").write_text("raise ImportError('no such kernel')\n")
    with pytest.raises(EnvironmentMissingError) as caught:
        service.replay(of_processes(2, 1), sglang=tmp_path, jobs=2)
    assert "cannot be imported" in caught.value.what
    assert not service._workers
