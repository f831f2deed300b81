"""What a server may do to the hooks that no hook foresees: threads, calls that are wrong.

Run as `python -m tests.record.hot_path_script SCENARIO FOLDER`, with or without the extension,
where SCENARIO is a number of threads or `ill-formed`; prints a JSON object. See
test_hot_path_faults.py.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from padtrace.contracts import engine
from padtrace.record import native
from padtrace.record.hooks import Hook, bound, watching
from padtrace.record.probes.forward import ForwardProbe
from padtrace.record.probes.launch import LaunchProbe
from padtrace.record.probes.pad import PadProbe, UnpadProbe
from padtrace.record.probes.plan import FlashMLAMetadataWatch, PlanProbe
from padtrace.record.probes.ready import ReadyProbe
from tests.record.standins import (
    ForwardBatch,
    ModelRunner,
    Output,
    Recorder,
    Tensor,
    decode_batch,
    never,
)

KERNEL = "flash_mla_with_kvcache"
LAYERS = 3
FORWARDS = 20


class Turns:
    """Lets one thread run at a time; each hands over to the next at the places it names."""

    def __init__(self, count: int) -> None:
        self._alive = list(range(count))
        self._turn = 0
        self._changed = threading.Condition()
        self._mine = threading.local()

    def start(self, number: int) -> None:
        self._mine.number = number
        self._wait()

    def hand_over(self) -> None:
        with self._changed:
            place = self._alive.index(self._mine.number)
            self._turn = self._alive[(place + 1) % len(self._alive)]
            self._changed.notify_all()
        self._wait()

    def end(self) -> None:
        with self._changed:
            place = self._alive.index(self._mine.number)
            self._alive.pop(place)
            if self._alive:
                self._turn = self._alive[place % len(self._alive)]
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == self._mine.number, 60)


class Server:
    """Functions as SGLang has them, hooked, that plan, pad and launch without a fault."""

    def __init__(self, folder: Path, hand_over: Any) -> None:
        self.recorder = recorder = Recorder(folder)
        context = recorder.context
        self.hand_over = hand_over
        probe = LaunchProbe(context, KERNEL, None)
        self.kernel = bound(probe.around(self._hook(KERNEL), never), self._launch)
        watch = FlashMLAMetadataWatch(context)
        self.metadata = watching(self._hook("metadata"), recorder.state, never, after=watch.after)
        plan = PlanProbe(context, "init_forward_metadata", probe.finish)
        self.plan = recorder.hook(plan, self._plan, "plan")
        self.pad = recorder.hook(PadProbe(context), self._pad, "pad")
        self.unpad = recorder.hook(UnpadProbe(context), self._unpad, "unpad")
        self.ready = recorder.hook(ReadyProbe(context), self._ready, "ready")
        forward = ForwardProbe(context, probe.finish, lambda runner: None, None)
        self.forward = recorder.hook(forward, self._forward, "forward")

    def _hook(self, name: str) -> Hook:
        return Hook(self.recorder.state, name, self.recorder.writer.hook(name, "found"))

    def one_forward(self, rows: int) -> None:
        self.forward(ModelRunner(), decode_batch(rows), SimpleNamespace(forward_metadata=None))

    def _forward(self, model_runner: Any, forward_batch: Any, backend: Any = None) -> Output:
        self.hand_over()
        backend = backend or SimpleNamespace(forward_metadata=None)
        self.plan(backend, forward_batch)
        self.ready(forward_batch)
        self.pad(forward_batch, model_runner)
        splits = backend.forward_metadata.flashmla_metadata.num_splits
        lengths = backend.forward_metadata.cache_seqlens_int32
        for _ in range(LAYERS):
            q = Tensor(forward_batch.batch_size, 1, 4, 8)
            cache = Tensor(9, 64, 1, 656)
            self.kernel(q=q, k_cache=cache, num_splits=splits, cache_seqlens=lengths)
        self.unpad(forward_batch, SimpleNamespace(next_token_logits=q, hidden_states=None))
        return Output()

    def _plan(self, backend: Any, forward_batch: Any) -> None:
        self.hand_over()
        lengths = Tensor(forward_batch.batch_size)

        def made(backend: Any, cache_seqlens: Any, seq_len_q: int) -> Any:
            self.hand_over()
            return SimpleNamespace(num_splits=Tensor(cache_seqlens.shape[0] + 1))

        metadata = self.metadata(made, backend, cache_seqlens=lengths, seq_len_q=1)
        backend.forward_metadata = SimpleNamespace(
            cache_seqlens_int32=lengths, max_seq_len_q=1, flashmla_metadata=metadata
        )

    def _pad(self, batch: Any, model_runner: Any) -> None:
        self.hand_over()

    def _ready(self, batch: Any) -> None:
        batch.forward_metadata_ready = True

    def _launch(
        self, q: Any, k_cache: Any, block_table: Any = None, cache_seqlens: Any = None,
        head_dim_v: Any = None, tile_scheduler_metadata: Any = None, num_splits: Any = None,
    ) -> str:  # fmt: skip
        self.hand_over()
        return "out"

    def _unpad(self, batch: Any, logits_output: Any) -> None:
        self.hand_over()

    def found(self) -> dict[str, Any]:
        self.recorder.writer.close()
        recording = self.recorder.recording()
        report = engine.check(recording)
        blind = recording.coverage["blind"]
        return {
            "verdict": report.verdict,
            "findings": len(report.findings),
            "lost": [n for n, h in recording.coverage["hooks"].items() if h["status"] == "lost"],
            "rows": {k: recording.rows(k) for k in ("forward", "plan", "pad", "launch")},
            # What the recorder says it left out because another thread called.
            "left_out": sum(blind.get("other_threads", {}).values()),
            "strays": _strays(recording),
        }


def _strays(recording: Any) -> int:
    """Launches that are said to belong to a forward of a batch of another size."""
    sizes = {
        event["forward"]: event.snapshot("entry")["batch_size"]
        for event in recording.events()
        if event.kind == "forward"
    }
    launches = [event for event in recording.events() if event.kind == "launch"]
    return sum(
        launch["q.shape"][0] != sizes[launch["forward"]]
        for launch in launches
        if launch["forward"] in sizes
    )


def threads(folder: Path, count: int) -> dict[str, Any]:
    """Healthy forwards, each thread with batches of its own size, in turns."""
    turns = Turns(count)
    server = Server(folder, turns.hand_over)
    errors: list[str] = []

    def work(number: int) -> None:
        turns.start(number)
        try:
            for _ in range(FORWARDS):
                server.one_forward(number + 1)
        except BaseException as error:
            errors.append(repr(error))
        finally:
            turns.end()

    running = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return {**server.found(), "errors": errors, "made": count * FORWARDS}


def ill_formed(folder: Path, name: str, way: str) -> dict[str, Any]:
    """One call that the function itself refuses, caught by the server; then a healthy forward."""
    server = Server(folder, lambda: None)
    function = getattr(server, name)
    batch = ForwardBatch(**decode_batch(2).__dict__)
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "nothing": ((), {}),
        "another name": ((), {"the_batch": batch, "the_runner": ModelRunner()}),
        "one name more": ((batch, ModelRunner(), batch), {"surprise": 1}),
    }
    arguments, named = given[way]
    refused = ""
    with contextlib.suppress(TypeError):
        try:
            function(*arguments, **named)
        except TypeError as error:
            refused = str(error)
            raise
    server.one_forward(2)
    return {**server.found(), "refused": refused}


FUNCTIONS = ("forward", "plan", "pad", "ready", "unpad", "kernel")
WAYS = ("nothing", "another name", "one name more")


def main() -> None:
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    if scenario == "ill-formed":
        found = {
            f"{name}, {way}": ill_formed(folder / name / way, name, way)
            for name in FUNCTIONS
            for way in WAYS
        }
    else:
        found = threads(folder, int(scenario))
    print(json.dumps({"compiled": native.compiled is not None, **found}))


if __name__ == "__main__":
    main()
