"""Values of device tensors in a recording: tensors `values/<process>/<enter_seq>/<field>`.

They are stored as integers, floats by their bit patterns, so that a file holds nothing but integers
whatever its tier; the element type of the server's tensor stands in the metadata.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PREFIX = "values/"
MAX_DIMENSIONS = 4

# Element types by torch's names, and the integers their bits are stored as.
STORED_AS: dict[str, type[np.signedinteger[Any]]] = {
    "bool": np.int8,
    "int8": np.int8,
    "uint8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "float8_e4m3fn": np.int8,
    "float8_e5m2": np.int8,
    "float16": np.int16,
    "bfloat16": np.int16,
    "float32": np.int32,
}
INTEGERS = ("bool", "int8", "uint8", "int16", "int32", "int64")

# What tier `meta` may hold: integer metadata by field; the rest is of tier `full`.
META_FIELDS = (
    "seq_lens", "req_pool_indices", "out_cache_loc", "positions", "extend_seq_lens",
    "extend_prefix_lens", "extend_start_loc", "cache_seqlens", "cache_seqlens_int32",
    "cu_seqlens_q", "cu_seqlens_k", "page_table_1", "real_page_table", "dsa_cache_seqlens_int32",
    "dsa_cu_seqlens_q", "dsa_cu_seqlens_k", "dsa_seqlens_expanded", "num_splits", "block_table",
)  # fmt: skip
FULL_FIELDS = ("q", "indices", "kv_rows", "kv_pages")

_NAME = re.compile(r"values/(0|[1-9]\d{0,9})/(0|[1-9]\d{0,17})/((?:entry\.|exit\.)?(\w{1,48}))")


@dataclass(frozen=True, slots=True)
class ValueKey:
    """Whose values: the event is the one of `process` that was entered as `enter_seq`.

    Attributes:
        field: such as `exit.out_cache_loc`: at entry or exit where the event has both.
    """

    process: int
    enter_seq: int
    field: str

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.process}/{self.enter_seq}/{self.field}"

    @property
    def plain_field(self) -> str:
        return self.field.removeprefix("entry.").removeprefix("exit.")


@dataclass(frozen=True, slots=True)
class ValueTensor:
    """One tensor.

    Attributes:
        data: the values, or for a float type their bits, in the server's shape.
        dtype: the element type on the server, by torch's name.
    """

    data: NDArray[Any]
    dtype: str


def key_of(name: str) -> ValueKey | None:
    """The key in a tensor's name, or None if it is none that padtrace writes."""
    match = _NAME.fullmatch(name)
    if match is None or match[4] not in (*META_FIELDS, *FULL_FIELDS):
        return None
    return ValueKey(int(match[1]), int(match[2]), match[3])


def tier_of(key: ValueKey, tensor: ValueTensor) -> str:
    """The lowest tier whose files may hold such a tensor."""
    integers = tensor.dtype in INTEGERS
    return "meta" if integers and key.plain_field in META_FIELDS else "full"
