"""Reads a recording as hostile input: bounded, typed errors, nothing executed.

The whole file is verified before anything is believed: container, format version, digests, limits,
types, row counts, then that every index points to something. What was read raises nothing later.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from padtrace.errors import BadRecordingError
from padtrace.one_line import one_line
from padtrace.recording import about, coverage, facts, limits, schema
from padtrace.recording.absent import HIGHEST_ABSENT_CODE
from padtrace.recording.columns import ENCODINGS, Int64Array, decode, verify, widen
from padtrace.recording.model import Recording, TableData
from padtrace.recording.value_tensors import (
    MAX_DIMENSIONS,
    PREFIX,
    STORED_AS,
    ValueKey,
    ValueTensor,
    key_of,
)
from padtrace.recording.writer import digest, metadata_digest

MAX_FILE_BYTES = 4 << 30
MAX_HEADER_BYTES = 64 << 20
MAX_VECTOR_VALUES_PER_ROW = 1 << 20
# Of what is said of a file in its own words.
_MAX_WHY = 300
_ASK_AGAIN = "ask for the file again, or record once more"
_DTYPES = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}


class _ColumnEntry(msgspec.Struct, rename={"same_as": "as"}):
    encoding: str
    type: str
    constant: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    same_as: str | None = None


class _TableEntry(msgspec.Struct):
    rows: int
    columns: dict[str, _ColumnEntry]


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read(path: Path) -> Recording:
    """Open and verify a recording.

    Raises:
        BadRecordingError: with the offset or the name of what is wrong.
    """
    return from_bytes(_load(path), str(path))


def from_bytes(data: bytes, name: str) -> Recording:
    """The same for a file that is in memory already; `name` is for messages."""
    tensors, texts = _container(data, name)
    _check_format(texts, name)
    if metadata_digest(texts) != texts.get("metadata_digest"):
        raise _bad(name, "its metadata do not match their digest", _ASK_AGAIN)
    digests = _json(texts, "digests", dict[str, str], name)
    for tensor_name, tensor in tensors.items():
        if digests.get(tensor_name) != digest(tensor.tobytes()):
            raise _bad(
                name,
                f"tensor {tensor_name} does not match its digest: bytes were changed",
                _ASK_AGAIN,
            )
    if digests.keys() != tensors.keys():
        missing = sorted(digests.keys() - tensors.keys())
        raise _bad(name, f"tensor {missing[0]} is listed but absent", _ASK_AGAIN)
    try:
        recording = _assemble(tensors, texts, name, limit=len(data))
        _check_views(recording)
    except BadRecordingError as error:
        if error.what == _what(name):
            raise
        # Columns and views know no file name, and who reads many files wants to know which it is.
        raise _bad(name, f"{error.what.removeprefix(_BAD)}: {error.why}", error.hint) from error
    _check_references(recording, name)
    return recording


def _load(path: Path) -> bytes:
    try:
        if not path.is_file():
            why = "it is a folder" if path.is_dir() else "there is no such file"
            raise _bad(str(path), why, "check the path; `padtrace record` prints where it wrote")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise _bad(str(path), f"{size} bytes exceed the limit of {MAX_FILE_BYTES}", "split it")
        return path.read_bytes()
    except OSError as error:
        raise _bad(str(path), f"{error.strerror}", "check the path and its permissions") from error


def _container(data: bytes, name: str) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    header, start = _header(data, name)
    texts: dict[str, str] = {}
    tensors: dict[str, NDArray[Any]] = {}
    spans: list[tuple[int, int]] = []
    for key, raw in header.items():
        if key == "__metadata__":
            texts = _convert(raw, dict[str, str], "__metadata__", name)
        else:
            tensors[key], span = _tensor(data, start, key, raw, name)
            spans.append(span)
    _check_spans(sorted(spans), len(data) - start, name)
    return tensors, texts


def _check_spans(spans: list[tuple[int, int]], size: int, name: str) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    reached = 0
    for begin, end in spans:
        if begin != reached:
            raise _bad(name, f"its tensors overlap or leave a gap at offset {begin}", _ASK_AGAIN)
        reached = end
    if reached != size:
        raise _bad(name, f"{size - reached} bytes follow its last tensor", _ASK_AGAIN)


def _header(data: bytes, name: str) -> tuple[dict[str, msgspec.Raw], int]:
    if not data:
        raise _bad(name, "the file is empty (0 bytes)", _ASK_AGAIN)
    if len(data) < 8:
        raise _bad(name, f"cut off at offset {len(data)}, inside the 8-byte length", _ASK_AGAIN)
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise _bad(
            name,
            f"offset 0 claims a header of {length} bytes; the limit is {MAX_HEADER_BYTES}",
            "this is no recording, or it is damaged",
        )
    if 8 + length > len(data):
        raise _bad(
            name, f"the header ends at offset {8 + length}, the file at {len(data)}", _ASK_AGAIN
        )
    try:
        return msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw]), 8 + length
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(
            name,
            f"the header at offset 8 is no JSON object: {error}",
            "this is no safetensors file",
        ) from error


def _tensor(
    data: bytes, start: int, key: str, raw: msgspec.Raw, name: str
) -> tuple[NDArray[Any], tuple[int, int]]:
    entry = _convert(raw, _TensorEntry, key, name)
    dtype = _DTYPES.get(entry.dtype)
    most = MAX_DIMENSIONS if key.startswith(PREFIX) else 1
    fits = 1 <= len(entry.shape) <= most and 0 <= min(entry.shape) <= max(entry.shape) <= len(data)
    if dtype is None or not fits:
        raise _bad(
            name,
            f"tensor {key} ({entry.dtype}, {len(entry.shape)} dimensions) is no column of integers",
            "this is a safetensors file, but no padtrace recording",
        )
    begin, end = entry.data_offsets
    count = math.prod(entry.shape)
    size = count * np.dtype(dtype).itemsize
    if begin < 0 or end - begin != size or start + end > len(data):
        raise _bad(
            name,
            f"tensor {key} should lie at offsets {start + begin} to {start + end}"
            f" with {size} bytes; the file has {len(data)}",
            _ASK_AGAIN,
        )
    flat = np.frombuffer(data, dtype=dtype, count=count, offset=start + begin)
    return flat.reshape(entry.shape), (begin, end)


def _check_format(texts: dict[str, str], name: str) -> None:
    stated = texts.get("format", "")
    family, _, version = stated.partition("/")
    if family != schema.FORMAT_NAME:
        raise _bad(
            name,
            "its metadata name no padtrace format",
            "this is a safetensors file, but no padtrace recording",
        )
    if version not in map(str, range(1, schema.FORMAT_VERSION + 1)):
        raise _bad(
            name,
            f"its format version is {version[:20]}; this padtrace reads {schema.FORMAT_VERSION}",
            "upgrade padtrace: pip install -U padtrace",
        )


def _assemble(
    tensors: dict[str, NDArray[Any]], texts: dict[str, str], name: str, limit: int
) -> Recording:
    entries = _json(texts, "tables", dict[str, _TableEntry], name)
    _check_same(entries, name)
    _check_columns(entries, tensors, name)
    tables: dict[str, TableData] = {}
    for table in schema.all_tables():
        entry = entries.get(table.name, _TableEntry(rows=0, columns={}))
        if not 0 <= entry.rows <= limit:
            raise _bad(name, f"table {table.name} claims {entry.rows} rows", _ASK_AGAIN)
        tables[table.name] = TableData(
            table.name, entry.rows, _loader(table.name, entry, tables, tensors, name)
        )
    return Recording(
        tables=tables,
        strings=_strings(texts, name),
        vector_values=widen(_required(tensors, "vector/values", name)),
        vector_offsets=widen(_required(tensors, "vector/offsets", name)),
        facts=_free(texts, "facts", list[dict[str, Any]], name),
        coverage=_free(texts, "coverage", dict[str, Any], name),
        about=_free(texts, "about", dict[str, Any], name),
        values=_values(tensors, texts, name),
    )


def _strings(texts: dict[str, str], name: str) -> list[str]:
    strings = _json(texts, "strings", list[str], name)
    problem = limits.problem_of_strings(strings)
    if problem is not None:
        raise _bad(name, f"strings: {problem}", _ASK_AGAIN)
    return strings


def _free(texts: dict[str, str], key: str, wanted: type[_Wanted], name: str) -> _Wanted:
    """JSON whose keys are not all known: bounded before it is decoded, and after."""
    problem = limits.problem_of_text(texts.get(key, ""))
    if problem is None:
        value = _json(texts, key, wanted, name)
        parts = value if isinstance(value, list) else [value]
        size = len(texts[key].encode()) / max(len(parts), 1)
        problem = limits.problem_of(value) or limits.problem_of_size(int(size))
        if problem is None:
            return value
    raise _bad(name, f"{key}: {problem}", _ASK_AGAIN)


def _values(
    tensors: dict[str, NDArray[Any]], texts: dict[str, str], name: str
) -> dict[ValueKey, ValueTensor]:
    """The values of device tensors; files written before there were any name none."""
    dtypes = _json({"values": "{}", **texts}, "values", dict[str, str], name)
    values: dict[ValueKey, ValueTensor] = {}
    for tensor_name in tensors:
        if not tensor_name.startswith(PREFIX):
            continue
        key, dtype = key_of(tensor_name), dtypes.get(tensor_name, "")
        if key is None or STORED_AS.get(dtype) != tensors[tensor_name].dtype:
            what = f"tensor {tensor_name[:80]} of type {dtype[:20]!r}"
            raise _bad(name, f"{what} is none that padtrace writes", _ASK_AGAIN)
        values[key] = ValueTensor(tensors[tensor_name], dtype)
    return values


def _loader(
    table: str,
    entry: _TableEntry,
    tables: dict[str, TableData],
    tensors: dict[str, NDArray[Any]],
    name: str,
) -> Callable[[str], Int64Array | None]:
    def load(column: str) -> Int64Array | None:
        described = entry.columns.get(column)
        if described is None:
            return None
        where = f"{table}/{column}"
        if described.encoding == "same":
            other_table, _, other_column = (described.same_as or "").partition("/")
            return tables[other_table].column(other_column)
        parts = _parts(described, where, tensors, name)
        return decode(described.encoding, described.constant, parts, entry.rows, where)

    return load


def _parts(
    described: _ColumnEntry, where: str, tensors: dict[str, NDArray[Any]], name: str
) -> dict[str, NDArray[Any]]:
    """The tensors of a column by their suffix."""
    if described.encoding not in ENCODINGS:
        raise _bad(name, f"column {where} has encoding {described.encoding!r}", "upgrade padtrace")
    suffixes = ENCODINGS[described.encoding]
    return {suffix: _required(tensors, f"{where}{suffix}", name) for suffix in suffixes}


def _check_columns(
    entries: dict[str, _TableEntry], tensors: dict[str, NDArray[Any]], name: str
) -> None:
    """Every known column can be rebuilt, though it is rebuilt when first asked for."""
    for table in schema.all_tables():
        entry = entries.get(table.name)
        if entry is None:
            continue
        wanted = {column.name for column in table.columns}
        wanted |= _lent(entries, table.name)
        for column in wanted & entry.columns.keys():
            described = entry.columns[column]
            if described.encoding != "same":
                where = f"{table.name}/{column}"
                parts = _parts(described, where, tensors, name)
                verify(described.encoding, described.constant, parts, entry.rows, where)


def _lent(entries: dict[str, _TableEntry], table: str) -> set[str]:
    """Columns of a table that others say they are the same as."""
    named = [
        (described.same_as or "").partition("/")
        for entry in entries.values()
        for described in entry.columns.values()
        if described.encoding == "same"
    ]
    return {column for of, _, column in named if of == table}


def _check_same(entries: dict[str, _TableEntry], name: str) -> None:
    """A column with the values of another must name one that is stored itself, of equal rows."""
    known = {table.name for table in schema.all_tables()}
    for table, entry in entries.items():
        for column, described in entry.columns.items():
            if described.encoding != "same":
                continue
            other_table, _, other_column = (described.same_as or "").partition("/")
            other = entries.get(other_table, _TableEntry(rows=-1, columns={}))
            stored = other.columns.get(other_column)
            # A chain of names could have no end.
            fits = stored is not None and stored.encoding != "same" and other.rows == entry.rows
            if not fits or other_table not in known:
                what = f"column {table}/{column} is said to be {described.same_as!r}"
                raise _bad(name, f"{what}, which cannot be", _ASK_AGAIN)


def _check_views(recording: Recording) -> None:
    """What is stated in JSON has the types that are read of it."""
    about.view(recording.about)
    coverage.view(recording.coverage)
    for stated in recording.facts:
        facts.view(stated)


def _check_references(recording: Recording, name: str) -> None:
    _check_vectors(recording, name)
    if len(recording.facts) != recording.rows("process"):
        raise _bad(name, "its facts do not match its processes", _ASK_AGAIN)
    _check_topology(recording, name)
    entries = {
        schema.ColumnType.STRING: len(recording.strings),
        schema.ColumnType.VECTOR: recording.rows("vector"),
        schema.ColumnType.STRINGS: recording.rows("vector"),
        schema.ColumnType.SNAPSHOT: recording.rows("snapshot"),
    }
    for table in schema.all_tables():
        data = recording.table(table.name)
        for column in table.columns:
            where = f"{table.name}/{column.name}"
            limit = (
                recording.rows("process") if column.name == "process" else entries.get(column.type)
            )
            if not column.optional:
                _check_present(data.column(column.name), where, name)
            if limit is not None:
                _check_index(data.column(column.name), limit, where, name)
            if column.type is schema.ColumnType.STRINGS:
                _check_lists_of_strings(recording, data.column(column.name), where, name)
    _check_anchors(recording, name)
    stray = [key for key in recording.values if key.process >= recording.rows("process")]
    if stray:
        raise _bad(name, f"tensor {stray[0].name} belongs to no process", _ASK_AGAIN)


def _check_anchors(recording: Recording, name: str) -> None:
    """Rows that no stored column proves would let a small file claim a huge table."""
    for kind in schema.EVENT_KINDS:
        data = recording.table(kind)
        if data.rows and data.column("enter_seq").strides == (0,):
            raise _bad(name, f"table {kind} does not store its enter_seq", _ASK_AGAIN)


def _check_vectors(recording: Recording, name: str) -> None:
    offsets = recording.vector_offsets
    lengths = np.diff(offsets)
    if (
        offsets.size != recording.rows("vector") + 1
        or int(offsets[0]) != 0
        or int(offsets[-1]) != recording.vector_values.size
        or bool((offsets[1:] < offsets[:-1]).any())
        or (lengths.size and int(lengths.max()) > MAX_VECTOR_VALUES_PER_ROW)
    ):
        raise _bad(name, "the offsets of its vectors do not fit their values", _ASK_AGAIN)


def _check_index(values: Int64Array, limit: int, where: str, name: str) -> None:
    if not values.size:
        return
    present = values[:1] if values.strides == (0,) else values
    present = present[present > HIGHEST_ABSENT_CODE]
    if present.size and (int(present.min()) < 0 or int(present.max()) >= limit):
        raise _bad(name, f"column {where} points past the {limit} entries there are", _ASK_AGAIN)


def _check_present(values: Int64Array, where: str, name: str) -> None:
    """Absent codes where nothing could be said of an event without the value."""
    absent = values <= HIGHEST_ABSENT_CODE
    if absent.any():
        row = int(np.flatnonzero(absent)[0])
        raise _bad(name, f"column {where} has no value in row {row}, which needs one", _ASK_AGAIN)


def _check_lists_of_strings(
    recording: Recording, values: Int64Array, where: str, name: str
) -> None:
    """The vectors that this column refers to hold indices of strings."""
    for row in np.unique(values[values > HIGHEST_ABSENT_CODE]).tolist():
        listed = recording.vector(row)
        if listed and not 0 <= min(listed) <= max(listed) < len(recording.strings):
            last = len(recording.strings) - 1
            raise _bad(name, f"column {where} lists a string past the last, {last}", _ASK_AGAIN)


def _check_topology(recording: Recording, name: str) -> None:
    """Ranks are told one by one, so their number must be one that a server can have."""
    table = recording.table("process")
    if table.rows > limits.MAX_PROCESSES:
        raise _bad(name, f"it has {table.rows} processes; the limit is {limits.MAX_PROCESSES}", "")
    ranks = 1
    for column in schema.PROCESS.columns:
        if column.unit not in ("rank", "ranks", "index"):
            continue
        values = table.column(column.name)
        present = values[values > HIGHEST_ABSENT_CODE]
        if present.size and not 0 <= int(present.min()) <= int(present.max()) <= limits.MAX_RANKS:
            raise _bad(name, f"column process/{column.name} holds no number of a rank", _ASK_AGAIN)
        if column.name in ("tp_size", "pp_size"):
            ranks *= int(present.max(initial=1))
    if ranks > limits.MAX_RANKS:
        raise _bad(name, f"its server has {ranks} ranks; the limit is {limits.MAX_RANKS}", "")


_Wanted = TypeVar("_Wanted")
_BAD = "bad recording: "


def _json(texts: dict[str, str], key: str, wanted: type[_Wanted], name: str) -> _Wanted:
    if key not in texts:
        raise _bad(name, f"its metadata lack {key!r}", _ASK_AGAIN)
    return _convert(msgspec.Raw(texts[key].encode()), wanted, key, name)


def _convert(raw: msgspec.Raw, wanted: type[_Wanted], key: str, name: str) -> _Wanted:
    try:
        return msgspec.json.decode(raw, type=wanted)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(name, f"{key} cannot be read: {error}", _ASK_AGAIN) from error


def _required(tensors: dict[str, NDArray[Any]], key: str, name: str) -> NDArray[Any]:
    if key not in tensors:
        raise _bad(name, f"tensor {key} is missing", _ASK_AGAIN)
    return tensors[key]


def _bad(name: str, why: str, hint: str) -> BadRecordingError:
    return BadRecordingError(_what(name), one_line(why, _MAX_WHY), hint or _ASK_AGAIN)


def _what(name: str) -> str:
    return f"{_BAD}{os.path.basename(name) or name}"
