"""One replay by several workers at once: each takes some of the recorded processes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import Any

from padtrace.recording.joining import join
from padtrace.recording.model import Recording

Progress = Callable[[int, int, str], None]
Share = tuple[int, int]

# A further worker has to import SGLang, which takes it the time of this many forwards.
_FORWARDS_PER_WORKER = 3000
# Each holds SGLang and torch in memory, some 600 MB.
_MOST_WORKERS = 8
_LISTED_EDITS = 1000
_COMPARED = ("events", "values", "different")
_LISTED_TEXTS = 20


def shares(recording: Recording, jobs: int | None) -> list[Share]:
    """Ranges of processes with about equally many forwards.

    Args:
        jobs: how many workers at most; None for as many as pay.
    """
    processes = recording.rows("process")
    if jobs is None:
        worth = recording.rows("forward") // _FORWARDS_PER_WORKER + 1
        jobs = min(len(os.sched_getaffinity(0)), worth, _MOST_WORKERS)
    jobs = max(1, min(jobs, processes))
    edges = [processes * index // jobs for index in range(jobs + 1)]
    return list(itertools.pairwise(edges))


def replay_shares(
    parts: Sequence[Share],
    one: Callable[[int, Share, Progress], Recording],
    progress: Progress,
    stop: Callable[[], None],
) -> Recording:
    """Replay every share in a thread of its own, and join what they give.

    Args:
        one: replays a share with the worker of this number.
        stop: ends all workers, which also ends the threads; called where a share fails.

    Raises:
        PadtraceError: of the first share that failed.
    """
    told = _Told(len(parts), progress)
    with ThreadPoolExecutor(len(parts)) as pool:
        asked = [pool.submit(one, i, part, told.by(i)) for i, part in enumerate(parts)]
        try:
            wait(asked, return_when=FIRST_EXCEPTION)
            # All of them, or one that raises here.
            replayed = [future.result() for future in asked if future.done()]
        except BaseException:
            # Also where the user interrupts: the threads must end before the pool does.
            told.stopped = True
            stop()
            raise
    joined = join(replayed)
    offsets = [first for first, _ in parts]
    joined.about.update(_joined_chains(replayed, offsets))
    joined.coverage["replay"] = _joined_coverage(replayed, offsets)
    joined.coverage["driven"] = _joined_driven(replayed, offsets)
    return joined


class _Told:
    """Adds up the progress of several threads for one listener.

    Attributes:
        stopped: another share failed, so what a worker says next ends its thread.
    """

    def __init__(self, workers: int, progress: Progress) -> None:
        self.stopped = False
        self._done = [(0, 0)] * workers
        self._progress = progress
        self._lock = threading.Lock()

    def by(self, worker: int) -> Progress:
        def progress(done: int, total: int, text: str) -> None:
            if self.stopped:
                raise CancelledError
            with self._lock:
                self._done[worker] = (done, total)
                sums = [sum(column) for column in zip(*self._done, strict=True)]
                if total or worker == 0:
                    self._progress(sums[0], sums[1], text)

        return progress


def _joined_chains(parts: Sequence[Recording], offsets: Sequence[int]) -> dict[str, Any]:
    """The chains of arithmetic under the process numbers of the joined recording."""
    texts: dict[tuple[str, ...], int] = {}
    chains: dict[str, int] = {}
    for part, offset in zip(parts, offsets, strict=True):
        own = [tuple(chain) for chain in part.about.get("chain_texts", [])]
        for key, index in part.about.get("chains", {}).items():
            process, _, rest = key.partition("/")
            chains[f"{int(process) + offset}/{rest}"] = texts.setdefault(own[index], len(texts))
    return {"chain_texts": [list(chain) for chain in texts], "chains": chains}


def _joined_coverage(parts: Sequence[Recording], offsets: Sequence[int]) -> dict[str, Any]:
    told = [part.coverage["replay"] for part in parts]
    edits = [
        {**edit, "process": edit["process"] + offset}
        for one, offset in zip(told, offsets, strict=True)
        for edit in one["outside_edit_list"]
    ]
    return {
        "outside_edits": sum(one["outside_edits"] for one in told),
        "outside_edit_list": edits[:_LISTED_EDITS],
        "not_replayed": _summed([one["not_replayed"] for one in told]),
        "equal_inputs": sum(one["equal_inputs"] for one in told),
        "kernel": _joined_kernel([one["kernel"] for one in told]),
    }


def _joined_driven(parts: Sequence[Recording], offsets: Sequence[int]) -> dict[str, Any]:
    """What was driven and what it was compared with, of all parts."""
    told = [part.coverage["driven"] for part in parts]
    compared = [one["compared"] for one in told]
    differences = [
        {**difference, "process": difference["process"] + offset}
        for one, offset in zip(compared, offsets, strict=True)
        for difference in one["differences"]
    ]
    return {
        "driven": sum(one["driven"] for one in told),
        "not_driven": _summed([one["not_driven"] for one in told]),
        "compared": {
            **{name: sum(one[name] for one in compared) for name in _COMPARED},
            "differences": differences[:_LISTED_EDITS],
            "not_compared": _summed([one["not_compared"] for one in compared]),
        },
    }


def _joined_kernel(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    answered = next((one for one in told if one["name"] is not None), told[0])
    texts = dict.fromkeys(text for one in told for text in one["without_answer"])
    return {
        **answered,
        "outcomes": _summed([one["outcomes"] for one in told]),
        "without_answer": list(texts)[:_LISTED_TEXTS],
    }


def _summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            sums[name] = sums.get(name, 0) + count
    return sums
