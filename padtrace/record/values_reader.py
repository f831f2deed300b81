"""Reads a values file; what is torn or damaged ends its half, it never raises for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np

from padtrace.record.device_values import layout
from padtrace.record.ring_reader import open_regular
from padtrace.recording.value_tensors import STORED_AS, ValueKey, ValueTensor, key_of

MAX_BYTES = 4 << 30


@dataclass(slots=True)
class KeptValues:
    """What one process kept.

    Attributes:
        counters: see `layout.COUNTERS`; {} if the file could not be read.
        problem: one line if the file could not be read.
    """

    tensors: dict[ValueKey, ValueTensor] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    problem: str = ""


def read_values(path: Path, process: int) -> KeptValues:
    """The values of one process, under its row in the recording."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                return KeptValues(problem=f"{path.name} is too large")
            data = file.read()
    except OSError as error:
        return KeptValues(problem=f"{path.name}: {error.strerror}")
    size = _size(data)
    if size != len(data):
        return KeptValues(problem=f"{path.name} is no values file, or cut off")
    numbers = np.frombuffer(data, "<i8", len(layout.COUNTERS), layout.COUNTERS_OFFSET)
    kept = KeptValues(counters=dict(zip(layout.COUNTERS, numbers.tolist(), strict=True)))
    half = layout.half_bytes(size)
    for number in (0, 1):
        start = layout.PAGE + number * half
        _read_half(data, start, start + half, process, kept)
    return kept


def _size(data: bytes) -> int:
    """The size the header states, or -1."""
    if len(data) < layout.PAGE:
        return -1
    fixed = data[: layout.HEADER.size]
    (checksum,) = layout.CHECKSUM.unpack_from(data, layout.HEADER.size)
    magic, version, _, size = layout.HEADER.unpack(fixed)
    sound = magic == layout.MAGIC and version == layout.VERSION and checksum == crc32(fixed)
    return int(size) if sound else -1


def _read_half(data: bytes, start: int, end: int, process: int, kept: KeptValues) -> None:
    view = memoryview(data)
    generation = None
    while start + layout.RECORD.size <= end:
        checksum, own, enter_seq, name_bytes, dtype, dimensions, *sizes, payload = (
            layout.RECORD.unpack_from(data, start)
        )
        body = start + layout.RECORD.size
        stop = body + name_bytes + payload
        if own == 0 or generation not in (None, own) or stop > end:
            return
        head = view[start + layout.CHECKSUM.size : body]
        if checksum != crc32(view[body:stop], crc32(head)):
            return
        generation = own
        key = key_of(f"values/{process}/{enter_seq}/{_text(data[body : body + name_bytes])}")
        tensor = _tensor(data, stop - payload, dtype, sizes[:dimensions], payload)
        if key is not None and tensor is not None:
            kept.tensors[key] = tensor
        start += layout.record_bytes(name_bytes, payload)


def _text(name: bytes) -> str:
    return name.decode("ascii", "replace")


def _tensor(
    data: bytes, start: int, dtype: int, shape: list[int], payload: int
) -> ValueTensor | None:
    if dtype >= len(layout.DTYPES) or min(shape, default=0) < 0:
        return None
    name = layout.DTYPES[dtype]
    stored = np.dtype(STORED_AS[name]).newbyteorder("<")
    count = 1
    for size in shape:
        count *= size
    if count * stored.itemsize != payload:
        return None
    values = np.frombuffer(data, stored, count, start)
    return ValueTensor(values.reshape(shape or (1,)), name)
