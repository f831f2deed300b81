"""The layout of a values file, shared by its writer (in the server) and its reader (outside).

    header    one page: fixed fields with a checksum, then live counters
    halves    two of equal size; records fill one after the other

When both halves are full the older one is filled anew, under the next generation number, so that a
bounded file always holds at least the newest half of what it can. A record is its head and its
bytes; the head is written last, with a checksum over both, so that a torn one is recognised.
"""

from __future__ import annotations

import struct

MAGIC = b"PTVALS\x01\n"
VERSION = 1
SUFFIX = ".values"
PAGE = 4096

# magic, version, pid, file bytes
HEADER = struct.Struct("<8sIIQ")
CHECKSUM = struct.Struct("<I")

COUNTERS_OFFSET = 1024
COUNTERS = (
    "kept",  # tensors written
    "dropped",  # tensors not written: too large, no room to stage them, or the file is full
    "overwritten",  # tensors written that newer ones have taken the place of
    "failed",  # 1: copying failed and was switched off
)
COUNTER = {name: index for index, name in enumerate(COUNTERS)}

# checksum of the rest of the head, the name and the bytes; generation; enter_seq; length of the
# name; dtype; dimensions; four sizes; bytes
RECORD = struct.Struct("<IIqHBB4x4qQ")
ALIGN = 64

# Element types by torch's names; a record holds the index.
DTYPES = (
    "bool", "int8", "uint8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2", "float16",
    "bfloat16", "float32",
)  # fmt: skip
MAX_DIMENSIONS = 4


def half_bytes(size: int) -> int:
    """How much of a file of `size` bytes one half is."""
    return (size - PAGE) // 2 // ALIGN * ALIGN


def record_bytes(name_bytes: int, payload: int) -> int:
    """The room a record takes."""
    return -(-(RECORD.size + name_bytes + payload) // ALIGN) * ALIGN
