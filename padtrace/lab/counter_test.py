"""The counter-test of sglang#30296: the fix proposed in PR #30642, applied to the live server.

This is the only switch of the lab that touches code under test. It is off unless
PADTRACE_LAB_FIX_30642=1. With it a server that dies of "num_splits must have shape (b+1)" answers,
which shows that the crash comes from the missing alignment and not from the lab.
"""

import os
from typing import Any

from padtrace.lab.standins.targets import module_if_present, replace


def apply_if_asked() -> bool:
    """Let `cal_padded_tokens` see token counts aligned to the attention TP size.

    Returns whether the fix was applied. Raises LookupError in a release without
    `cal_padded_tokens`, since then the counter-test would say nothing.
    """
    if os.environ.get("PADTRACE_LAB_FIX_30642") != "1":
        return False
    name = "sglang.srt.layers.attention.dsa.utils"
    utils = module_if_present(name)
    if utils is None:
        raise LookupError(f"this SGLang has no {name}; PADTRACE_LAB_FIX_30642 has no target")
    original = utils.cal_padded_tokens
    from sglang.srt.runtime_context import get_parallel

    def cal_padded_tokens(forward_batch: Any) -> Any:
        align = get_parallel().attn_tp_size
        counts = forward_batch.global_num_tokens_cpu
        forward_batch.global_num_tokens_cpu = [-(-count // align) * align for count in counts]
        try:
            return original(forward_batch)
        finally:
            forward_batch.global_num_tokens_cpu = counts

    replace(utils, "cal_padded_tokens", cal_padded_tokens)
    return True
