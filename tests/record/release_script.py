"""Runs inside an interpreter that has torch and one real SGLang release on its path.

Prints one JSON object: what the plugin did to the real ForwardBatch, and how real calls went.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace as Namespace
from typing import Any

import torch

for _name in ("nms", "qnms"):  # a CPU torch lacks them, and torchvision wants their schemas
    torch.library.define(f"torchvision::{_name}", "(Tensor a, Tensor b, float c) -> Tensor")

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from padtrace.record import plugin  # noqa: E402
from padtrace.record.targets import TARGETS, choose, live_look  # noqa: E402

HOOKED = (
    "init_new",
    "prepare_mlp_sync_batch",
    "_pad_inputs_to_size",
    "post_forward_mlp_sync_batch",
)


def run_scheduler_process() -> None:
    """The name by which the plugin knows a process that runs a model."""
    plugin.register()


def objects() -> dict[str, Any]:
    return {name: ForwardBatch.__dict__[name] for name in HOOKED}


def rows(count: int, value: int = 0) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int64)


def padded() -> dict[str, int]:
    """Pad three requests of five tokens to four rows, through SGLang's own function."""
    runner = Namespace(
        is_draft_worker=False,
        attn_backend=Namespace(
            get_cuda_graph_seq_len_fill_value=lambda: 1,
            get_cpu_graph_seq_len_fill_value=lambda: 1,
        ),
        device="cpu",
    )
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=3,
        input_ids=rows(3),
        req_pool_indices=rows(3),
        seq_lens=rows(3, 5),
        seq_lens_cpu=rows(3, 5),
        out_cache_loc=rows(3),
        seq_lens_sum=15,
        positions=rows(3),
        lora_ids=[None, None, None],
    )
    batch._pad_inputs_to_size(runner, 4, 4)
    return {"input_ids": batch.input_ids.shape[0], "seq_lens_sum": batch.seq_lens_sum}


def main() -> None:
    """Off, in another process, then on: identity first, then a real call."""
    found = {target.hook: choose(target, live_look)[0] for target in TARGETS}
    before = objects()
    plugin.register()
    HookRegistry.apply_hooks()
    off = all(before[name] is now for name, now in objects().items())
    run_scheduler_process()
    HookRegistry.apply_hooks()
    on = [name for name, now in objects().items() if before[name] is not now]
    json.dump({"off_is_identical": off, "hooked": on, "pad": padded(), "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
