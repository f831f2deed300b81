"""The small level of the indexer: `Indexer.forward` replaced whole by "select everything".

For a release whose indexer code the stand-ins of `indexer_kernels` no longer fit. Where they do,
that other level is the default: it keeps SGLang's code, and starts as fast.
"""

from typing import Any

import torch

from padtrace.lab.standins.targets import first_present, replace


def install() -> None:
    """Replace `Indexer.forward`."""
    indexer = first_present(
        "sglang.srt.layers.attention.dsa.dsa_indexer", "sglang.srt.layers.attention.nsa.nsa_indexer"
    )
    replace(indexer.Indexer, "forward", select_all)


def select_all(
    self: Any,
    x: Any,
    q_lora: Any,
    positions: Any,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
) -> torch.Tensor | None:
    """Top-k indices that select every KV token a row may see.

    Returns int32 [rows of x, index_topk]. Rows that the plan does not know stay -1 (nothing
    selected), as `Indexer._get_topk_paged` leaves them.
    """
    if not return_indices:
        return None
    from sglang.srt.model_executor.forward_context import get_attn_backend

    rows = (x[0] if isinstance(x, tuple) else x).shape[0]
    metadata = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
    lengths = metadata.get_seqlens_expanded()
    known = min(rows, lengths.shape[0])
    indices = torch.full((rows, self.index_topk), -1, dtype=torch.int32)
    if known:
        column = torch.arange(self.index_topk)
        chosen = column.expand(known, -1)
        if not metadata.force_unfused_topk:  # the fused kernel answers in physical slots
            chosen = _physical_slots(metadata, known, column)
        visible = column < lengths[:known, None]
        indices[:known] = torch.where(visible, chosen, -1).to(torch.int32)
    return indices


def _physical_slots(metadata: Any, rows: int, column: torch.Tensor) -> torch.Tensor:
    table = metadata.get_page_table_1()
    request = metadata.get_token_to_batch_idx()
    row = torch.arange(rows) if request is None else request[:rows].long()
    row = row.clamp(max=table.shape[0] - 1)
    chosen: torch.Tensor = table[row][:, column.clamp(max=table.shape[1] - 1)]
    return chosen
