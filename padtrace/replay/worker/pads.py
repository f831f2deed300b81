"""The pad and the unpad of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from padtrace.recording.absent import Absent
from padtrace.recording.model import Value
from padtrace.replay.worker.events import RecordedEvent
from padtrace.replay.worker.groups import Node
from padtrace.replay.worker.outcomes import Outcome
from padtrace.replay.worker.snapshots import row_count

if TYPE_CHECKING:
    from padtrace.replay.worker.life import BatchLife

_OWNER_LISTS = (
    "extend_seq_lens_cpu",
    "extend_prefix_lens_cpu",
    "extend_logprob_start_lens_cpu",
)


class Pads:
    """Runs `prepare_mlp_sync_batch`, `_pad_inputs_to_size` and `post_forward_mlp_sync_batch`."""

    def __init__(self, life: BatchLife) -> None:
        self._life = life

    def pad(self, node: Node) -> None:
        life = self._life
        life.enter(node)
        owners = {name: getattr(life.batch, name, None) for name in _OWNER_LISTS}
        scheduled = [list(counts) for counts in life.scheduled]
        outcome = life.add("pad", node, {"entry": life.take(), "function": node.event["function"]})
        self._run(outcome, node)
        outcome.values.update(self._sizes())
        outcome.values.update(
            {
                "exit": life.take(),
                "scheduler_list_changed": int(scheduled != life.scheduled),
                **{f"owner.{name}.rows": row_count(owner) for name, owner in owners.items()},
                "owner.lora_ids.rows": Absent.NO_ATTRIBUTE
                if life.lora_owner is None
                else len(life.lora_owner),
            }
        )
        self._keep_chain(outcome)
        life.padded = True
        self._nested(node, outcome)
        life.edits.after(node.event.snapshot("exit"))

    def _run(self, outcome: Outcome, node: Node) -> None:
        life = self._life
        runner = life.site.runners[node.event.text("worker") or "target"]
        function = node.event.text("function") or "prepare_mlp_sync_batch"
        if function == "_pad_inputs_to_size":
            sizes = node.event.integer("num_tokens"), node.event.integer("bs")
            pad = life.batch._pad_inputs_to_size
            life.call(outcome, node, function, pad, runner, *sizes)
        else:
            pad = life.site.capabilities.pad
            life.call(outcome, node, function, pad, life.batch, runner)

    def _sizes(self) -> dict[str, Value]:
        """What the pad asked `_pad_inputs_to_size` for."""
        sizes = self._life.site.provenance.sizes
        if not sizes:
            return {"num_tokens": None, "bs": None}
        return {"num_tokens": int(sizes[0][0]), "bs": int(sizes[0][1])}

    def _keep_chain(self, outcome: Outcome) -> None:
        provenance = self._life.site.provenance
        if provenance.sizes:
            num_tokens = provenance.sizes[0][0]
            chain = provenance.rows_chain(num_tokens, num_tokens)
            outcome.chains["input_ids.rows"] = self._life.pad_chain = chain

    def _nested(self, node: Node, outcome: Outcome) -> None:
        """`_pad_inputs_to_size` within the pad: the same call, seen once more."""
        calls = self._life.site.provenance.sizes
        pads = [child for child in node.children if child.event.kind == "pad"]
        for child, (num_tokens, bs) in zip(pads, calls, strict=False):
            values: dict[str, Value] = {
                "function": child.event["function"],
                "num_tokens": int(num_tokens),
                "bs": int(bs),
                "exit": outcome.values["exit"],
            }
            self._life.add("pad", child, values)

    def unpad(self, node: Node) -> None:
        life, event = self._life, node.event
        life.enter(node)
        logits_rows = self._output_rows(event, "logits_before.rows")
        hidden_rows = self._output_rows(event, "hidden_states_before.rows")
        output = life.site.capabilities.logits_class(
            next_token_logits=_zeros(logits_rows), hidden_states=_zeros(hidden_rows)
        )
        values: dict[str, Value] = {
            "entry": life.take(),
            "logits_before.rows": logits_rows,
            "hidden_states_before.rows": hidden_rows,
        }
        outcome = life.add("unpad", node, values)
        unpad = life.site.capabilities.unpad
        life.call(outcome, node, "post_forward_mlp_sync_batch", unpad, life.batch, output)
        outcome.values.update(
            {
                "exit": life.take(),
                "logits_after.rows": row_count(output.next_token_logits),
                "hidden_states_after.rows": row_count(output.hidden_states),
            }
        )
        life.padded = False
        life.edits.after(event.snapshot("exit"))

    def _output_rows(self, event: RecordedEvent, column: str) -> int | None:
        """Rows of the model's output: as recorded, moved along with the padded rows."""
        batch, value = self._life.batch, event[column]
        if value is None:
            return None
        tokens, requests = int(batch.input_ids.shape[0]), int(batch.batch_size)
        by_request = batch.forward_mode.name in ("EXTEND", "MIXED")
        if not isinstance(value, int):
            return requests if by_request else tokens
        recorded = event.snapshot("entry") or {}
        was = [(recorded.get("input_ids.rows"), tokens), (recorded.get("batch_size"), requests)]
        for then, now in reversed(was) if by_request else was:
            if value == then:
                return now
        return value


def _zeros(count: int | None) -> Any:
    return None if count is None else torch.zeros((count, 1))
