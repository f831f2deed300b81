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
from padtrace.record.hooks import Hook, watching
from padtrace.record.probes.batch import InitNewProbe
from padtrace.record.probes.forward import ForwardProbe
from padtrace.record.probes.launch import LaunchProbe
from padtrace.record.probes.pad import PadProbe, UnpadProbe
from padtrace.record.probes.plan import FlashMLAMetadataWatch, PlanProbe
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


class FaultError(Exception):
    """What the made server raises now and then."""


class Driver:
    """One made process: batches that are planned, padded, launched and unpadded."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.recorder = recorder = Recorder(folder)
        self.random = random.Random(seed)
        context = recorder.context
        launches = LaunchProbe(context, "flash_mla_with_kvcache", None)
        forward = ForwardProbe(context, launches.finish, lambda runner: None, None)
        self.init_new = recorder.hook(InitNewProbe(context, None), lambda cls, made, runner: made)
        self.forward = recorder.hook(forward, self._forward, "forward")
        self.plan = recorder.hook(
            PlanProbe(context, "init_forward_metadata", launches.finish), self._plan, "plan"
        )
        self.pad = recorder.hook(PadProbe(context), self._pad, "pad")
        self.unpad = recorder.hook(UnpadProbe(context), self._unpad, "unpad")
        state, writer = recorder.state, recorder.writer
        watch = watching(
            Hook(state, "flashmla", writer.hook("flashmla", "found")),
            state,
            never,
            after=FlashMLAMetadataWatch(context).after,
        )
        self.metadata = lambda *args: watch(self._metadata, *args)
        hook = Hook(state, "launch", writer.hook("launch", "found"))
        launch = launches.around(hook, never)
        self.launch = lambda **given: launch(self._launch, **given)
        self.runner = ModelRunner()
        self.backend = SimpleNamespace(forward_metadata=None)

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
        batch = self.init_new(ForwardBatch, made, self.runner)
        with contextlib.suppress(FaultError):
            self.forward(self.runner, batch)

    def _forward(self, runner: Any, batch: Any) -> Output:
        self.plan(self.backend, batch)
        self.pad(batch, runner)
        splits, lengths = Tensor(batch.batch_size + 1), Tensor(batch.batch_size)
        for layer in range(self.random.randrange(6)):
            rows = batch.batch_size + (layer == 3)
            given = {"q": Tensor(rows, 1, 4, 8), "num_splits": splits, "cache_seqlens": lengths}
            if layer % 2:
                given["indices"] = Tensor(rows, 1, 16)
            self.launch(**given)
        self.unpad(batch, SimpleNamespace(next_token_logits=Tensor(3), hidden_states=None))
        return Output(self.random.random() < 0.5)

    def _plan(self, backend: Any, batch: Any) -> None:
        rows = batch.batch_size
        made = SimpleNamespace(num_splits=Tensor(rows + 1))
        self.metadata(backend, Tensor(rows), 1)
        backend.forward_metadata = SimpleNamespace(
            cache_seqlens_int32=Tensor(rows), max_seq_len_q=1, flashmla_metadata=made
        )

    def _metadata(self, backend: Any, cache_seqlens: Any, width: int) -> Any:
        return SimpleNamespace(num_splits=Tensor(cache_seqlens.shape[0] + 1))

    def _pad(self, batch: Any, runner: Any) -> None:
        if self.random.random() < 0.05:
            raise FaultError("in the pad")
        batch.batch_size += self.random.randrange(3)
        batch.input_ids = Tensor(batch.batch_size)
        batch.global_num_tokens_cpu[0] += 1

    def _launch(self, **given: Any) -> str:
        if self.random.random() < 0.02:
            raise FaultError("in the kernel")
        return "out"

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
                "grown_blocks": growth[-1] - growth[0],
                **found(driver.recorder.writer.path),
            }
        )
    )


if __name__ == "__main__":
    main()
