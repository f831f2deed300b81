"""Small recordings written by hand, for the tests of the file and of its readers."""

from __future__ import annotations

from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.model import Recording


def small_recording() -> Recording:
    """Two ranks, one draft decode each, planned before the pad (numbers of sglang#30296)."""
    builder = RecordingBuilder({"source": "made", "tier": "shape", "sglang": "0.5.18"})
    for rank in range(2):
        process = builder.add_process(
            {"tp_rank": rank, "attn_tp_size": 8, "role": "null", "complete": True},
            {"sglang": {"version": "0.5.18"}, "parallel": {"attn_tp_size": 8}},
        )
        header = {"process": process, "worker": "draft", "batch": 0, "step": 1, "phase": "serve"}
        before = {
            "forward_mode": "DRAFT_EXTEND_V2",
            "batch_size": 1,
            "input_ids.rows": 6,
            "hidden_states": None,
            "global_num_tokens_cpu": [6],
        }
        before.pop("hidden_states")
        after = {**before, "input_ids.rows": 8, "global_num_tokens_cpu": [8]}
        builder.add_event(
            "plan",
            {**header, "enter_seq": 0, "exit_seq": 1, "entry": before, "num_splits.rows": 7},
        )
        builder.add_event(
            "pad", {**header, "enter_seq": 2, "exit_seq": 3, "entry": before, "exit": after}
        )
        builder.add_event(
            "error",
            {**header, "enter_seq": 4, "type": "RuntimeError", "frames": ["a.py:1 f", "b.py:2 g"]},
        )
    return builder.finish({"hooks": {}})
