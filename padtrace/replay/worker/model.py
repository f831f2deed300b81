"""The model of a driven forward: one attention layer, in the release's own calls around it.

It holds no weights. Its layer gives SGLang's own `RadixAttention` q, k, v and top-k indices with
the rows that the hidden states have; where a model splits them over the ranks of prefill context
parallelism, the release's own functions do it, called as its DeepSeek model calls them.
"""

from __future__ import annotations

from typing import Any

import torch

from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.standins import not_held

_VOCABULARY = 4
_BF16 = torch.bfloat16
_V_HEAD = 128


class Expectations:
    """What a forward's output has, as far as no shape says it.

    Attributes:
        hidden: whether the logits processor hands hidden states on, as was recorded; None where
            the batch says it by its capture mode.
    """

    hidden: bool | None = None


class OneLayerModel(torch.nn.Module):
    """See the module.

    Args:
        values: of the model configuration, see `model_config`.
        attn_tp: attention tensor-parallel size, which shares the heads.
        cp: context-parallel size and rank.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        values: dict[str, Any],
        attn_tp: int,
        cp: tuple[int, int],
        pp_group: Any,
        expectations: Expectations,
    ) -> None:
        super().__init__()
        self._capabilities = capabilities
        self._expectations = expectations
        self._cp_size, self._cp_rank = cp
        self._heads = max(int(values["num_attention_heads"]) // attn_tp, 1)
        self._topk = int(values["index_topk"])
        self._rank, self._rope = int(values["kv_lora_rank"]), int(values["qk_rope_head_dim"])
        self._nope = int(values["qk_nope_head_dim"])
        attention = capabilities.radix_attention
        mla = self._rank + self._rope
        self.attn_mqa = attention(self._heads, mla, 1.0, 1, 0, v_head_dim=self._rank)
        self.attn_mha = attention(
            self._heads, self._nope + self._rope, 1.0, self._heads, 0, v_head_dim=_V_HEAD
        )
        # What SGLang's runners ask of a model besides.
        object.__setattr__(self, "model", self._body)
        object.__setattr__(self, "pp_group", pp_group)
        self.lm_head = None
        self.shared_experts_config = None

    def get_input_embeddings(self) -> Any:
        return lambda ids: torch.zeros((ids.shape[0], 1))

    def forward(
        self,
        input_ids: Any,
        positions: Any,
        forward_batch: Any,
        input_embeds: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        rows = input_ids.shape[0] if input_embeds is None else input_embeds.shape[0]
        self._split_old_way(rows, forward_batch)
        hidden = self._body(input_ids, positions, forward_batch, input_embeds)
        return self.logits_processor(input_ids, hidden, None, forward_batch, None)

    def logits_processor(
        self, input_ids: Any, hidden: Any, lm_head: Any, forward_batch: Any, *_: Any, **__: Any
    ) -> Any:
        """Logits per request of a prefill, per row of any other batch; hidden states with them."""
        by_request = forward_batch.forward_mode.name in ("EXTEND", "MIXED")
        rows = forward_batch.batch_size if by_request else hidden.shape[0]
        return self._capabilities.logits_class(
            next_token_logits=torch.zeros((rows, _VOCABULARY)),
            hidden_states=self._handed_on(hidden, rows, forward_batch),
        )

    def _handed_on(self, hidden: Any, logits_rows: int, forward_batch: Any) -> Any:
        mode = getattr(forward_batch.capture_hidden_mode, "name", None)
        expected = self._expectations.hidden
        if expected is False or (expected is None and mode in (None, "NULL")):
            return None
        return hidden if mode == "FULL" else hidden[:logits_rows]

    def _split_old_way(self, rows: int, forward_batch: Any) -> None:
        """The metadata of context parallelism before CP-v2, as `DeepseekV2ForCausalLM.forward`."""
        old = self._capabilities.old_context_parallel
        if old is None or not old.enabled() or old.on_cp_v2(forward_batch):
            return
        if old.can_split(rows, self._cp_size, True, forward_batch):
            forward_batch.attn_cp_metadata = old.prepare(
                rows, self._cp_rank, self._cp_size, forward_batch
            )

    def _body(
        self,
        input_ids: Any,
        positions: Any,
        forward_batch: Any,
        input_embeds: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """What a model's layers do to the rows of hidden states [rows, 1]."""
        rows = input_ids.shape[0] if input_embeds is None else input_embeds.shape[0]
        hidden = torch.zeros((rows, 1))
        old = self._capabilities.old_context_parallel
        splits = old is not None and not old.on_cp_v2(forward_batch) and old.uses(forward_batch)
        if splits:
            assert old is not None
            hidden = old.split(forward_batch, hidden)
        # SGLang's layers call no attention without rows.
        if hidden.shape[0]:
            self._layer(hidden, forward_batch, splits)
        return torch.zeros((rows, 1)) if splits else hidden

    def _layer(self, hidden: Any, forward_batch: Any, gathered: bool) -> None:
        handle = self._capabilities.attention_method
        method = getattr(handle(self, forward_batch), "name", None) if handle else "MLA"
        if method == "MHA_ONE_SHOT":
            self._mha(hidden.shape[0], forward_batch)
        elif method == "MLA":
            self._mla(hidden.shape[0], forward_batch, gathered)
        else:
            raise not_held(f"attention method {method}")

    def _mha(self, rows: int, forward_batch: Any) -> None:
        cached = any(forward_batch.extend_prefix_lens_cpu)
        kv_rows = int(sum(forward_batch.seq_lens_cpu.tolist())) if cached else rows
        width = self._nope + self._rope
        q = torch.zeros((rows, self._heads, width), dtype=_BF16)
        k = torch.zeros((kv_rows, self._heads, width), dtype=_BF16)
        v = torch.zeros((kv_rows, self._heads, _V_HEAD), dtype=_BF16)
        self.attn_mha(q, k, v, forward_batch, save_kv_cache=False)

    def _mla(self, rows: int, forward_batch: Any, gathered: bool) -> None:
        # Shapes without storage: nothing reads a value of q, and hundreds of heads take time.
        q = torch.empty((rows, self._heads * self._rank), dtype=_BF16, device="meta")
        q_rope = torch.empty((rows, self._heads * self._rope), dtype=_BF16, device="meta")
        # Under context parallelism k is gathered from all ranks before it is written.
        split = gathered or forward_batch.attn_cp_metadata is not None
        kv_rows = forward_batch.out_cache_loc.shape[0] if split else rows
        k = torch.empty((kv_rows, 1, self._rank), dtype=_BF16, device="meta")
        k_rope = torch.empty((kv_rows, 1, self._rope), dtype=_BF16, device="meta")
        topk = torch.full((rows, self._topk), -1, dtype=torch.int32)
        self.attn_mqa(q, k, k, forward_batch, q_rope=q_rope, k_rope=k_rope, topk_indices=topk)
