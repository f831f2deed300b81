"""Values of tensors in the file: written as they were, and nothing else is let in by their name."""

from __future__ import annotations

import json
import struct

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save

from padtrace.errors import BadRecordingError
from padtrace.recording import reader, writer
from padtrace.recording.value_tensors import ValueKey, ValueTensor
from tests.recording.helpers import small_recording

GOOD = "values/0/2/exit.out_cache_loc"


def test_they_come_back_as_they_were() -> None:
    recording = small_recording()
    given = {
        ValueKey(0, 2, "entry.seq_lens"): ValueTensor(np.array([5, 1 << 40]), "int64"),
        ValueKey(1, 0, "page_table_1"): ValueTensor(np.array([[1, -1]], np.int32), "int32"),
        ValueKey(1, 4, "q"): ValueTensor(np.zeros((2, 1, 3, 4), np.int16), "bfloat16"),
        ValueKey(1, 4, "indices"): ValueTensor(np.zeros((0, 8), np.int32), "int32"),
    }
    recording.values.update(given)
    read = reader.from_bytes(writer.to_bytes(recording), "memory")
    assert read.values.keys() == given.keys()
    for key, value in given.items():
        assert read.values[key].dtype == value.dtype
        assert read.values[key].data.dtype == value.data.dtype
        assert np.array_equal(read.values[key].data, value.data)


def test_they_open_with_the_plain_library_and_a_file_without_has_none() -> None:
    recording = small_recording()
    assert not [name for name in load(writer.to_bytes(recording)) if name.startswith("values/")]
    assert reader.from_bytes(writer.to_bytes(recording), "memory").values == {}
    recording.values[ValueKey(0, 2, "exit.positions")] = ValueTensor(np.array([7]), "int64")
    tensors = load(writer.to_bytes(recording))
    assert tensors["values/0/2/exit.positions"].tolist() == [7]


def forged(tensors: dict[str, NDArray], dtypes: dict[str, str]) -> bytes:
    """A small recording with tensors that padtrace did not write, all digests right."""
    data = writer.to_bytes(small_recording())
    (length,) = struct.unpack("<Q", data[:8])
    texts: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    every = {**load(data), **tensors}
    digests = {name: writer.digest(tensor.tobytes()) for name, tensor in every.items()}
    texts["digests"] = msgspec.json.encode(digests).decode()
    texts["values"] = msgspec.json.encode(dtypes).decode()
    texts["metadata_digest"] = writer.metadata_digest(texts)
    return save(every, metadata=texts)


def test_the_forger_could_write_a_sound_one() -> None:
    data = forged({GOOD: np.array([1])}, {GOOD: "int64"})
    assert [key.name for key in reader.from_bytes(data, "memory").values] == [GOOD]


@pytest.mark.parametrize(
    ("name", "tensor", "dtype"),
    [
        ("values/0/2/exit.input_ids", np.array([1]), "int64"),  # token ids are of no tier
        ("values/0/2/exit/positions", np.array([1]), "int64"),
        ("values/00/2/positions", np.array([1]), "int64"),
        ("values/0/-2/positions", np.array([1]), "int64"),
        ("values/2/2/positions", np.array([1]), "int64"),  # there are two processes
        (GOOD, np.array([1], np.int32), "int64"),
        (GOOD, np.array([1], np.int16), "complex64"),
        (GOOD, np.array([1]), ""),
        (GOOD, np.zeros((1, 1, 1, 1, 1), np.int64), "int64"),
        (GOOD, np.array(1), "int64"),
        (GOOD, np.array([1.0], np.float32), "float32"),
        ("enter/values", np.zeros((2, 2), np.int64), "int64"),
    ],
)
def test_what_padtrace_does_not_write_is_refused(name: str, tensor: NDArray, dtype: str) -> None:
    with pytest.raises(BadRecordingError):
        reader.from_bytes(forged({name: tensor}, {name: dtype}), "memory")


def test_a_changed_byte_is_seen() -> None:
    recording = small_recording()
    values = np.array([0x123456789A], np.int64)
    recording.values[ValueKey(0, 2, "exit.out_cache_loc")] = ValueTensor(values, "int64")
    data = bytearray(writer.to_bytes(recording))
    data[data.index(values.tobytes())] ^= 1
    with pytest.raises(BadRecordingError, match="digest"):
        reader.from_bytes(bytes(data), "memory")
