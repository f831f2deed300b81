"""The layout of a ring file, shared by its writer (in the server) and its reader (outside).

    header    one page: fixed fields with a checksum, then live counters
    hooks     one page: per hook its fired count and why it was lost
    static    strings, facts and hooks, append-only entries with length and checksum
    slots     SLOT_BYTES each; a record fills one slot or a chain of consecutive ones

Every slot of a chain carries its own sequence number, its position, the chain's length and the
checksum of the whole record, so a record is read whole or not at all. Integers are little-endian.
"""

from __future__ import annotations

import struct

MAGIC = b"PTRING\x02\n"
VERSION = 2
SUFFIX = ".ring"

PAGE = 4096
HOOKS_OFFSET = PAGE
STATIC_OFFSET = 2 * PAGE
MAX_HOOKS = 256

SLOT_BYTES = 256
# sequence number, checksum, position in the chain, slots in the chain, bytes of the whole record
SLOT_HEAD = struct.Struct("<QIHHI4x")
PAYLOAD_BYTES = SLOT_BYTES - SLOT_HEAD.size
SLOT = struct.Struct(f"<QIHHI4x{PAYLOAD_BYTES}s")
MAX_CHAIN = 4096

# magic, version, slot bytes, file bytes, static bytes, slots, policy, pid, wall clock (ns),
# monotonic clock (ns), schema digest, run, boot id, host, session
HEADER = struct.Struct("<8sIIQQQIQQQQ64s40s64s48s")
CHECKSUM = struct.Struct("<I")

# Live counters: int64 at COUNTERS_OFFSET, each written in one aligned store.
COUNTERS_OFFSET = 1024
COUNTERS = (
    "complete",  # the process closed the ring in good order
    "events",  # events begun, dropped ones included
    "updates",  # updates begun
    "refused",  # events not written: ring full (first), frozen (error), or too long
    "bad",  # events that were no list of int64
    "static_used",  # bytes of the static area
    "static_refused",  # strings, facts or hooks the static area had no room for
    "hooks",  # hooks registered
    "forwards",  # forward events
    "errors",  # error events
    "divergences",  # row contracts the live alarm found broken
    "frozen",  # an `error` ring has stopped
)
COUNTER = {name: index for index, name in enumerate(COUNTERS)}

# length of the payload, checksum of it, type, number (string id or hook)
ENTRY = struct.Struct("<IIII")
ENTRY_STRING = 1
ENTRY_FACTS = 2
ENTRY_HOOK = 3

POLICIES = ("last", "first", "error")

MIN_BYTES = 256 << 10
MAX_BYTES = 4 << 30
MAX_STATIC_BYTES = 4 << 20

HOOK_STATUSES = ("found", "moved", "absent", "lost")


def static_bytes(size: int) -> int:
    """How much of a ring of `size` bytes holds strings and facts: a quarter, at most 4 MiB."""
    return min(size // 4, MAX_STATIC_BYTES) // PAGE * PAGE


def seed(first: int, size: int) -> int:
    """Where a record's checksum starts, so that it covers what the slot heads say as well.

    A checksum from another start always differs, so a flipped bit in either number shows. The
    length of the chain follows from `size`.
    """
    return (first + (first >> 32) + (size << 1)) & 0xFFFFFFFF
