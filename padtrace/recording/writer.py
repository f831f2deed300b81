"""Writes a Recording to one safetensors file, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from padtrace import __version__
from padtrace.errors import UsageError
from padtrace.recording import limits, schema
from padtrace.recording.columns import EncodedColumn, encode, narrow
from padtrace.recording.model import Recording

# What is stored already: a column's fingerprint to the name of its first tensor.
_Stored = dict[tuple[Any, ...], str]


def write(recording: Recording, path: Path, *, force: bool = False) -> int:
    """Write `recording` to `path` (mode 0600), atomically; returns the size in bytes.

    Raises:
        UsageError: the file exists and `force` is not set, or the folder cannot be written.
    """
    if path.exists() and not force:
        raise UsageError(
            f"{path} exists already",
            "padtrace does not overwrite a recording unasked",
            "choose another name, or add --force",
        )
    data = to_bytes(recording)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}", f"{error.strerror}", "choose a folder that can be written"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {path}", f"{error.strerror}", "free some space or choose another folder"
        ) from error
    return len(data)


def to_bytes(recording: Recording) -> bytes:
    """The file as bytes."""
    tensors: dict[str, NDArray[Any]] = {}
    described: dict[str, Any] = {}
    stored: _Stored = {}
    for table in schema.all_tables():
        if table.name == "vector":
            continue
        described[table.name] = _describe(recording, table, tensors, stored)
    tensors["vector/values"] = narrow(recording.vector_values)
    tensors["vector/offsets"] = narrow(recording.vector_offsets)
    described["vector"] = {
        "rows": recording.rows("vector"),
        "meaning": schema.VECTOR.meaning,
        "columns": {},
    }
    for key, value in recording.values.items():
        tensors[key.name] = np.ascontiguousarray(value.data)
    return save(tensors, metadata=_metadata(recording, described, tensors))


def _describe(
    recording: Recording,
    table: schema.Table,
    tensors: dict[str, NDArray[Any]],
    stored: _Stored,
) -> dict[str, Any]:
    data = recording.table(table.name)
    columns: dict[str, Any] = {}
    anchor = _anchor(table)
    for column in table.columns:
        values = np.ascontiguousarray(data.column(column.name))
        encoded = encode(values, anchor=column.name == anchor)
        entry: dict[str, Any] = {
            "type": column.type.value,
            "unit": column.unit,
            "meaning": column.meaning,
            "encoding": encoded.encoding,
        }
        if encoded.constant is not None:
            entry["constant"] = encoded.constant
        name = f"{table.name}/{column.name}"
        first = stored.setdefault(_fingerprint(encoded), name) if encoded.tensors else name
        if first != name and column.name != anchor:
            columns[column.name] = {**entry, "encoding": "same", "as": first}
            continue
        for suffix, tensor in encoded.tensors.items():
            tensors[f"{name}{suffix}"] = tensor
            if not suffix:
                entry["dtype"] = str(tensor.dtype)
        columns[column.name] = entry
    return {"rows": data.rows, "meaning": table.meaning, "columns": columns}


def _fingerprint(column: EncodedColumn) -> tuple[Any, ...]:
    """Equal for columns that hold the same values: their encoding follows from these."""
    parts = [(s, str(t.dtype), digest(t.tobytes())) for s, t in column.tensors.items()]
    return (column.encoding, *parts)


def _anchor(table: schema.Table) -> str:
    """The column that is stored in full, so that the file proves its row count."""
    return "enter_seq" if table.name in schema.EVENT_KINDS else table.columns[0].name


def _metadata(
    recording: Recording, described: dict[str, Any], tensors: dict[str, NDArray[Any]]
) -> dict[str, str]:
    parts: dict[str, Any] = {
        "about": _about(recording),
        "absent": {
            "none": "lowest number of the column's dtype: SGLang held None",
            "no attribute": "lowest + 1: this release has no such attribute",
            "not observed": "lowest + 2: nobody looked",
            "constant": "constants use int64 for this",
        },
        "tables": described,
        "strings": [limits.cut(text) for text in recording.strings],
        "facts": [_bounded(facts, "the facts of a process") for facts in recording.facts],
        "coverage": _bounded(recording.coverage, "its coverage"),
        "values": {key.name: value.dtype for key, value in recording.values.items()},
        "digests": {name: digest(tensor.tobytes()) for name, tensor in tensors.items()},
    }
    texts = {name: msgspec.json.encode(part).decode() for name, part in parts.items()}
    for name in ("about", "facts", "coverage"):
        _refuse(limits.problem_of_text(texts[name]), name)
    size = sum(map(len, texts.values()))
    if size > limits.MAX_METADATA_BYTES:
        _refuse(f"{size} bytes exceed {limits.MAX_METADATA_BYTES}", "all that is no number")
    texts["format"] = f"{schema.FORMAT_NAME}/{schema.FORMAT_VERSION}"
    texts["metadata_digest"] = metadata_digest(texts)
    return texts


def _about(recording: Recording) -> dict[str, Any]:
    """Where it came from; of a very long replay without the arithmetic of its calls."""
    about = {**recording.about, "producer": f"padtrace {__version__}"}
    if len(msgspec.json.encode(about)) > limits.MAX_OBJECT_BYTES:
        about = {**about, "chains": {}, "chain_texts": []}
        note = "the arithmetic of its calls was left out: it did not fit the file"
        about["notes"] = [*(about.get("notes") or []), note]
    fitting: dict[str, Any] = _bounded(about, "what it says about itself")
    return fitting


def _bounded(value: Any, what: str) -> Any:
    """JSON that the reader takes: long strings are cut, and no object is larger than the limit."""
    fitting = limits.fitted(value)
    _refuse(limits.problem_of_size(len(msgspec.json.encode(fitting))), what)
    return fitting


def _refuse(problem: str | None, what: str) -> None:
    """Rather than to write what no padtrace would open."""
    if problem is not None:
        raise UsageError(f"cannot write the recording: {what} is too much", problem, "record less")


def content_digest(data: bytes) -> str:
    """The `metadata_digest` of a file as `to_bytes` made it: it covers every tensor.

    The bytes themselves will not do, since the order of the entries is left to safetensors.
    """
    size = int.from_bytes(data[:8], "little")
    found: str = json.loads(data[8 : 8 + size])["__metadata__"]["metadata_digest"]
    return found


def digest(data: bytes) -> str:
    """BLAKE2b of 16 bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def metadata_digest(texts: dict[str, str]) -> str:
    """Digest over every metadata entry but itself, names included."""
    joined = "\0".join(
        f"{name}\0{texts[name]}" for name in sorted(texts) if name != "metadata_digest"
    )
    return digest(joined.encode())
