"""Drives the hot path with made batches and prints what a reader finds; see test_native.py.

The same seed gives the same calls, so that two processes, one with the extension and one without,
must print the same.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from padtrace.record import native, wire
from padtrace.record.failures import ErrorRecorder
from padtrace.record.hooks import Hook, bound, watching
from padtrace.record.probes.batch import InitNewProbe, SyncProbe
from padtrace.record.probes.forward import ForwardProbe
from padtrace.record.probes.graph import BucketWatch, GraphProbe
from padtrace.record.probes.launch import LaunchProbe
from padtrace.record.probes.pad import PadInputsProbe, PadProbe, UnpadProbe
from padtrace.record.probes.plan import FlashMLAMetadataWatch, PlanProbe, SliceWatch
from padtrace.record.probes.ready import ReadyProbe
from padtrace.record.probes.steps import StepCounter
from padtrace.record.ring_reader import read_ring
from tests.record.standins import (
    ForwardBatch,
    HostTensor,
    ModelRunner,
    Output,
    PaddingMode,
    Recorder,
    Tensor,
    decode_batch,
    never,
)

KERNELS = ("flash_mla_with_kvcache", "fp8_paged_mqa_logits", "get_mla_metadata")


class FaultError(Exception):
    """What the made server raises now and then."""


class Told:
    """How often the live alarm is told something, and a digest of what."""

    count = 0
    digest = hashlib.sha256()

    def launch(self, function: str, record: Any, q_rows: int, splits: int) -> None:
        assert splits >= 0
        if splits != q_rows + 1:
            Told.count += 1
            told = (function, record.number, record.planned_by, q_rows, splits)
            Told.digest.update(repr(told).encode())


class Backend:
    """One with its metadata in a class of its own."""

    forward_metadata: Any = None


class Bare:
    """Metadata with few columns, whose num_splits lies a level deeper."""

    def __init__(self, rows: int) -> None:
        inner = SimpleNamespace(num_splits=Tensor(rows + 1))
        self.flashmla_metadata = SimpleNamespace(flashmla_metadata=inner)
        self.max_seq_len_q = rows


class Scheduled:
    """A ScheduleBatch with its counts; the vote has either name, or there is none."""

    def __init__(self, made: Any, counts: Any, vote: Any) -> None:
        self.made = made
        self.global_num_tokens = counts
        self.global_num_tokens_for_logprob = None
        if vote is not None:
            self.can_run_decode_cuda_graph = vote


def made_metadata(rows: int) -> Any:
    return SimpleNamespace(
        cache_seqlens_int32=Tensor(rows),
        max_seq_len_q=1,
        flashmla_metadata=SimpleNamespace(num_splits=Tensor(rows + 1)),
    )


class Driver:
    """One made process: batches that are planned, padded, launched and unpadded."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.recorder = recorder = Recorder(folder)
        self.random = random.Random(seed)
        context = recorder.context
        state = recorder.state
        state.on_error.append(ErrorRecorder(state, None))
        self.launches = [LaunchProbe(context, name, Told()) for name in KERNELS]
        ready = ReadyProbe(context) if seed % 2 else None
        forward = ForwardProbe(context, self._finish, lambda runner: None, ready)
        inline = SyncProbe(context) if seed % 2 else None
        self.init_new = recorder.hook(InitNewProbe(context, inline), self._init_new, "init_new")
        self.sync = recorder.hook(SyncProbe(context), self._sync, "sync")
        self.ready = recorder.hook(ReadyProbe(context), self._ready, "ready")
        self.forward = recorder.hook(forward, self._forward, "forward")
        names = ("init_forward_metadata", "init_forward_metadata_replay_cuda_graph")
        self.plans = [
            recorder.hook(PlanProbe(context, name, self._finish), self._plan, name)
            for name in names
        ]
        self.pad = recorder.hook(PadProbe(context), self._pad, "pad")
        self.pad_inputs = recorder.hook(PadInputsProbe(context), self._pad_inputs, "pad_inputs")
        self.unpad = recorder.hook(UnpadProbe(context), self._unpad, "unpad")
        self.judge = recorder.hook(
            GraphProbe(context, "can_run_graph", chooses=False), lambda runner, batch: True, "judge"
        )
        self.load = recorder.hook(
            GraphProbe(context, "load_batch", chooses=True), self._load, "load"
        )
        buckets = BucketWatch(context)
        steps = StepCounter(context)
        self.bucket = self._watch("bucket", after=buckets.padded)
        self.largest = self._watch("largest", after=buckets.largest)
        self.slice = self._watch("slice", after=SliceWatch(context).after)
        self.metadata = self._watch("flashmla", after=FlashMLAMetadataWatch(context).after)
        self.step_of = self._watch("step", before=steps.sync)
        self.round = self._watch("round", before=steps.round)
        self.kernels = [
            self._kernel(probe, name) for probe, name in zip(self.launches, KERNELS, strict=True)
        ]
        self.runner, self.draft = ModelRunner(), ModelRunner(is_draft_worker=True)
        self.backends = [SimpleNamespace(forward_metadata=None), Backend()]
        self.graph_runners = [
            SimpleNamespace(model_runner=self.draft, capture_bs=[1, 2, 4], max_bs=4),
            SimpleNamespace(captured_req_width=2, bs=3),
        ]

    def _finish(self) -> None:
        for probe in self.launches:
            probe.finish()

    def _watch(self, name: str, **asked: Any) -> Any:
        recorder = self.recorder
        hook = Hook(recorder.state, name, recorder.writer.hook(name, "found"))
        return watching(hook, recorder.state, never, **asked)

    def _kernel(self, probe: LaunchProbe, name: str) -> Any:
        recorder = self.recorder
        hook = Hook(recorder.state, name, recorder.writer.hook(name, "found"))
        return bound(probe.around(hook, never), self._launch)

    def step(self) -> None:
        draw = self.random
        rows = draw.randrange(1, 9)
        made = decode_batch(
            rows,
            seq_lens_cpu=HostTensor([draw.randrange(1, 99) for _ in range(rows)]),
            global_num_tokens_cpu=[draw.randrange(9) for _ in range(draw.randrange(1, 5))],
            dp_padding_mode=draw.choice((None, *PaddingMode)),
            extend_seq_lens_cpu=draw.choice((None, [], [3] * rows, [None], [2**70])),
            spec_info=draw.choice((None, SimpleNamespace(draft_token_num=draw.randrange(5)))),
        )
        if draw.random() < 0.1:
            del made.__dict__["lora_ids"]
        runner = draw.choice((self.runner, self.draft))
        if draw.random() < 0.3:
            self.step_of(lambda: None)
        if draw.random() < 0.3:
            self.round(lambda: None)
        scheduled = Scheduled(made, self._counts(), draw.choice((None, True, False, 1)))
        with contextlib.suppress(FaultError):
            self._step(scheduled, runner)
        for act in (self._kernels, lambda batch: self.load(draw.choice(self.graph_runners), batch)):
            if draw.random() < 0.1:
                with contextlib.suppress(FaultError):
                    act(made)

    def _step(self, scheduled: Scheduled, runner: ModelRunner) -> None:
        draw, batch = self.random, scheduled.made
        way = draw.random()  # now and then no init_new makes the batch
        if way < 0.5:
            batch = self.init_new(ForwardBatch, scheduled, runner)
        elif way < 0.9:
            batch = self.init_new(ForwardBatch, batch=scheduled, model_runner=runner)
        if draw.random() < 0.3:
            self.plans[0](draw.choice(self.backends), batch)
            self.ready(batch)
        for _ in range(draw.choice((1, 1, 1, 3))):
            self.forward(runner, batch, skip_attn_backend_init=draw.random() < 0.5)

    def _counts(self) -> Any:
        draw = self.random
        return draw.choice(
            (None, [], [1, 2], [draw.randrange(9) for _ in range(4)], [None], (3, 4))
        )

    def _init_new(self, cls: Any, batch: Any, model_runner: Any) -> Any:
        made = batch.made
        self.sync(made, batch, "cpu")
        if self.random.random() < 0.03:
            raise FaultError("in init_new")
        return made

    def _sync(self, forward_batch: Any, batch: Any, device: str) -> None:
        counts = batch.global_num_tokens
        forward_batch.global_num_tokens_cpu = counts
        forward_batch.original_global_num_tokens_cpu = (
            counts if self.random.random() < 0.5 or counts is None else list(counts)
        )
        if isinstance(counts, list) and self.random.random() < 0.2:
            counts.append(7)

    def _ready(self, batch: Any) -> None:
        batch.forward_metadata_ready = True
        batch.forward_metadata_planned_bs = batch.batch_size

    def _forward(self, runner: Any, batch: Any, skip_attn_backend_init: bool = False) -> Any:
        graph_runner = self.random.choice(self.graph_runners)
        self.judge(graph_runner, batch)
        if self.random.random() < 0.3:
            self.load(graph_runner, forward_batch=batch)
        backend = self.random.choice(self.backends)
        if self.random.random() < 0.5:
            self.plans[0](backend, forward_batch=batch)
        else:
            self.plans[1](backend, *self.random.choice(((3,), (batch, 2), (batch,), ())))
        self.pad(batch, runner)
        self._kernels(batch)
        output = SimpleNamespace(next_token_logits=Tensor(3), hidden_states=None)
        self.unpad(batch, output)
        result = Output(self.random.random() < 0.5)
        return self.random.choice((result, (None, True), None))

    def _kernels(self, batch: Any) -> None:
        splits, lengths = Tensor(batch.batch_size + 1), Tensor(batch.batch_size)
        for layer in range(self.random.randrange(6)):
            rows = batch.batch_size + (layer == 3)
            given = {"q": Tensor(rows, 1, 4, 8), "num_splits": splits, "cache_seqlens": lengths}
            if layer % 2:
                given["indices"] = Tensor(rows, 1, 16)
            if layer % 3 == 0:
                self.kernels[0](given["q"], Tensor(9, 64), num_splits=splits)
            if layer % 4 == 1:
                tiles = SimpleNamespace(num_splits=splits, tile_scheduler_metadata=Tensor(4, 8))
                given.update(num_splits=None, tile_scheduler_metadata=tiles)
            self.kernels[0](**given)
            self.kernels[1](given["q"], kv_cache=Tensor(2, 2), context_lens=lengths)

    def _plan(self, backend: Any, *given: Any, **named: Any) -> None:
        rows = self.random.randrange(1, 9)
        if self.random.random() < 0.3:
            # Part of the event that is open.
            self.plans[0](backend, *given, **named)
        if self.random.random() < 0.8:
            self.metadata(self._metadata, backend, cache_seqlens=Tensor(rows), seq_len_q=1)
        else:
            self.kernels[2](cache_seqlens=Tensor(rows))
        if self.random.random() < 0.2:
            self.slice(lambda made, part: made, SimpleNamespace(num_splits=Tensor(4)), slice(0, 3))
        if self.random.random() < 0.03:
            raise FaultError("in the plan")
        backend.forward_metadata = self.random.choice((made_metadata(rows), Bare(rows), None))

    def _metadata(self, backend: Any, cache_seqlens: Any, seq_len_q: int) -> Any:
        return SimpleNamespace(num_splits=Tensor(cache_seqlens.shape[0] + 1))

    def _pad(self, batch: Any, runner: Any) -> None:
        if self.random.random() < 0.05:
            raise FaultError("in the pad")
        self.pad_inputs(batch, runner, self.random.choice((None, 4)), bs=3)

    def _pad_inputs(self, batch: Any, runner: Any, num_tokens: Any, bs: int) -> None:
        batch.batch_size += self.random.randrange(3)
        batch.input_ids = Tensor(batch.batch_size)
        if isinstance(batch.global_num_tokens_cpu, list):
            batch.global_num_tokens_cpu.append(1)

    def _load(self, runner: Any, forward_batch: Any) -> None:
        if self.random.random() < 0.5:
            self.largest(lambda: 3)
            self.bucket(lambda raw, buckets: 4, 3, [1, 2, 4])
        if self.random.random() < 0.03:
            raise FaultError("in the graph")

    def _launch(self, *given: Any, **named: Any) -> Any:
        if self.random.random() < 0.02:
            raise FaultError("in the kernel")
        return self.random.choice(("out", (Tensor(2), Tensor(5))))

    def _unpad(self, batch: Any, output: Any) -> None:
        batch.batch_size = 1


def found(path: Path) -> dict[str, Any]:
    """What is in the ring, without times."""
    ring = read_ring(path)
    digests = {}
    for kind, block in {**ring.events, wire.SNAPSHOT: ring.snapshots}.items():
        assert block is not None
        scalars = block.scalars.copy()
        if kind != wire.SNAPSHOT:
            scalars[:, wire.layout(kind).index("t_ns")] = 0
        content = scalars.tobytes() + block.values.tobytes() + block.starts.tobytes()
        digests[kind] = [len(scalars), hashlib.sha256(content).hexdigest()]
    return {
        "events": digests,
        "counters": ring.counters,
        "strings": [ring.strings[number] for number in sorted(ring.strings)],
        "hooks": [[hook.name, hook.status, hook.fired] for hook in ring.hooks],
        "damaged": ring.damaged,
    }


def main() -> None:
    folder, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    driver = Driver(folder, seed)
    growth: list[int] = []
    gc.collect()
    for number in range(steps):
        driver.step()
        if number in (steps // 2, steps - 1):
            gc.collect()
            growth.append(sys.getallocatedblocks())
    print(
        json.dumps(
            {
                "compiled": native.compiled is not None,
                "alarms": (Told.count, Told.digest.hexdigest()),
                "grown_blocks": growth[-1] - growth[0],
                **found(driver.recorder.writer.path),
            }
        )
    )


if __name__ == "__main__":
    main()
