"""A ForwardBatch that refuses what nobody observed: its fields without a column of the recording.

A field that the class sets to None where nothing is given would be a silent guess of ours. So the
rebuilt batch is of a subclass in which such a field, until SGLang sets it, is refused with the
line that reads it. The few that SGLang's eager path does read are listed with the reason why a
default is what the server had.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from padtrace.replay.worker.standins import Unobserved, not_held

_NO_WINDOW = "a DSA model has no sliding window"
_NO_IMAGES = "recorded: the batch has ids, not embeddings"
_NO_OVERLAP = "recorded: the batch is not split in two"
_NO_MAMBA = "a DSA model has no Mamba layer"
_DEVICE = "a device tensor, whose host integer is recorded"
_BY_THE_PATH = "set by SGLang's own path before it is used"
_IDS = "ids of requests for tracing; padded like the others, and no row count depends on them"

# Read by the eager path; the class's own default is what a server's batch holds.
GIVEN = {
    "num_token_non_padded": _DEVICE,
    "global_num_token_non_padded": _DEVICE,
    "global_num_tokens_for_logprob_gpu": _DEVICE,
    "req_pool_indices_cpu": "a host mirror of req_pool_indices, which is recorded",
    "out_cache_loc_swa": _NO_WINDOW,
    "origin_out_cache_loc": _BY_THE_PATH,
    "_attn_output": _BY_THE_PATH,
    "replace_embeds": _NO_IMAGES,
    "mm_input_embeds": _NO_IMAGES,
    "tbo_children": _NO_OVERLAP,
    "tbo_parent_token_range": _NO_OVERLAP,
    "mamba_prefill_track_mask_cpu": _NO_MAMBA,
    "mamba_track_seqlens_cpu": _NO_MAMBA,
    "sampling_info": "a sampler's values: no row count depends on them",
    "rids_int": _IDS,
    "bootstrap_room_ids_int": _IDS,
}
_COPIERS = ("dataclasses", "copy")


class _Refused:
    """Stands in a class for a field that nobody observed; an object's own value goes before it."""

    def __init__(self, name: str, default: Any) -> None:
        self._name = f"forward_batch.{name}"
        self._default = default

    def __get__(self, batch: Any, owner: Any = None) -> Any:
        if batch is None:
            return self._default
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if reader in _COPIERS:
            return Unobserved(self._name)
        if reader.startswith("padtrace.record"):
            raise AttributeError(self._name)
        raise not_held(self._name)


@cache
def strict(base: Any, held: frozenset[str]) -> Any:
    """A subclass of a release's ForwardBatch in which other fields than these are refused.

    Args:
        held: fields that a recording has columns for, or that the driver gives.
    """
    known = held | GIVEN.keys()
    fields = base.__dataclass_fields__
    refused = [name for name in fields if name not in known]
    members: dict[str, Any] = {name: _Refused(name, vars(base).get(name)) for name in refused}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        values = self.__dict__
        for name in refused:
            # What a copy hands on unseen, or the class has set by itself.
            if name not in kwargs or values.get(name).__class__ is Unobserved:
                values.pop(name, None)

    members["__init__"] = __init__
    return type(base.__name__, (base,), members)
