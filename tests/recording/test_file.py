"""The file: what was written is read, and nothing else is believed."""

from __future__ import annotations

import json
import os
import resource
import stat
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from padtrace.errors import BadRecordingError, UsageError
from padtrace.recording import reader, schema, writer
from padtrace.recording.absent import Absent
from padtrace.recording.builder import RecordingBuilder
from padtrace.recording.model import Recording
from tests.recording.helpers import small_recording

VALUES: dict[schema.ColumnType, st.SearchStrategy[Any]] = {
    schema.ColumnType.INT: st.integers(-(2**63) + 3, 2**63 - 1),
    schema.ColumnType.BOOL: st.integers(0, 1),
    schema.ColumnType.STRING: st.text(max_size=8),
    schema.ColumnType.VECTOR: st.lists(st.integers(-(2**31), 2**62), max_size=5),
    schema.ColumnType.STRINGS: st.lists(st.text(max_size=5), max_size=3),
}
ABSENT = st.sampled_from([None, Absent.NO_ATTRIBUTE, Absent.NOT_OBSERVED])


def values_of(columns: tuple[schema.Column, ...]) -> st.SearchStrategy[dict[str, Any]]:
    plain = [column for column in columns if column.type is not schema.ColumnType.SNAPSHOT]
    return st.dictionaries(st.sampled_from(plain), st.none(), max_size=6).flatmap(
        lambda chosen: st.fixed_dictionaries(
            {column.name: st.one_of(VALUES[column.type], ABSENT) for column in chosen}
        )
    )


@st.composite
def events(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(schema.EVENT_KINDS))
    columns = schema.event_columns(kind)
    values = draw(values_of(columns))
    for column in columns:
        if column.type is schema.ColumnType.SNAPSHOT:
            values[column.name] = draw(st.one_of(values_of(schema.SNAPSHOT.columns), ABSENT))
    values["process"] = 0
    values["enter_seq"] = draw(st.integers(0, 2**40))
    return kind, values


@settings(max_examples=60, deadline=None)
@given(st.lists(events(), max_size=12))
def test_what_was_written_is_read(given_events: list[tuple[str, dict[str, Any]]]) -> None:
    builder = RecordingBuilder({"tier": "shape"})
    builder.add_process({"tp_rank": 0}, {})
    written = [(kind, builder.add_event(kind, values), values) for kind, values in given_events]
    back = reader.from_bytes(writer.to_bytes(builder.finish()), "memory")
    for kind, row, values in written:
        event = back.event(kind, row)
        for name, value in values.items():
            got = event[name]
            if isinstance(value, dict):
                assert isinstance(got, dict)
                assert {key: got[key] for key in value} == value
                rest = set(got) - set(value)
                assert all(got[key] is Absent.NOT_OBSERVED for key in rest)
            else:
                assert got == value


def test_events_come_back_in_order_of_entry() -> None:
    recording = small_recording()
    order = [(e.integer("process"), e.kind) for e in recording.events()]
    assert order == [(0, "plan"), (0, "pad"), (0, "error"), (1, "plan"), (1, "pad"), (1, "error")]
    assert [e.kind for e in recording.events(process=1)] == ["plan", "pad", "error"]
    assert list(recording.events(step=9)) == []


def test_equal_snapshots_and_vectors_are_stored_once() -> None:
    recording = small_recording()
    assert recording.rows("snapshot") == 2
    assert recording.rows("vector") == 3


def test_columns_with_equal_values_are_stored_once() -> None:
    builder = RecordingBuilder({"source": "made"})
    process = builder.add_process({"tp_rank": 0}, {})
    for number in range(40):
        moving = {"batch": number % 7, "forward": number % 7, "step": number % 5}
        numbers = {"process": process, "enter_seq": number, "exit_seq": number + 1}
        builder.add_event("pad", {**numbers, **moving, "bs": number % 7})
    made = builder.finish({})
    data = writer.to_bytes(made)
    stored = load(data)
    assert "pad/batch" in stored
    assert not {"pad/forward", "pad/bs"} & stored.keys()
    assert {"pad/step", "pad/enter_seq"} <= stored.keys(), "these have other values"
    assert list(reader.from_bytes(data, "memory").events()) == list(made.events())


def test_the_plain_safetensors_library_opens_it_and_it_explains_itself(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    writer.write(small_recording(), path)
    assert load(path.read_bytes())["pad/enter_seq"].tolist() == [2, 2]
    header_length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    metadata = json.loads(path.read_bytes()[8 : 8 + header_length])["__metadata__"]
    tables = json.loads(metadata["tables"])
    for kind in schema.EVENT_KINDS:
        for column in schema.event_columns(kind):
            assert tables[kind]["columns"][column.name]["meaning"] == column.meaning


def test_the_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "small.safetensors"
    writer.write(small_recording(), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        writer.write(small_recording(), path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["small.safetensors"]


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.safetensors"
    writer.write(small_recording(), path)
    before = path.read_bytes()

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UsageError, match="cannot write"):
        writer.write(small_recording(), path, force=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["small.safetensors"]


def test_every_flipped_byte_is_noticed() -> None:
    """One bit of every byte of the file in turn: refused, never a wrong value, never a crash."""
    data = writer.to_bytes(small_recording())
    plain = reader.from_bytes(data, "memory")
    length = struct.unpack("<Q", data[:8])[0]
    step = max(1, len(data) // 1200)
    positions = [*range(0, len(data), step), *range(8 + length, len(data))]
    for position in positions:
        changed = bytearray(data)
        changed[position] ^= 0x10
        try:
            read = reader.from_bytes(bytes(changed), "memory")
        except BadRecordingError:
            continue
        # White space or an escape may change without changing what is said.
        assert list(read.events()) == list(plain.events()), f"byte {position}"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_damage_gives_a_typed_error(data: st.DataObject) -> None:
    original = writer.to_bytes(small_recording())
    cut = data.draw(st.integers(0, len(original)))
    junk = data.draw(st.binary(max_size=64))
    at = data.draw(st.integers(0, cut))
    damaged = original[:at] + junk + original[at + len(junk) : cut]
    if damaged == original:
        return
    with pytest.raises(BadRecordingError):
        reader.from_bytes(damaged, "memory")


def _future() -> bytes:
    recording = small_recording()
    tensors = load(writer.to_bytes(recording))
    texts = writer._metadata(recording, {}, {})
    texts["format"] = f"{schema.FORMAT_NAME}/{schema.FORMAT_VERSION + 1}"
    return save(tensors, metadata=texts)


HOSTILE = {
    "empty": (b"", "0 bytes"),
    "shorter than its length": (b"abc", "offset 3"),
    "wrong magic": (b"PK\x03\x04" + b"\0" * 60, "claims a header"),
    "a header of 8 EiB": (
        struct.pack("<Q", 2**63) + b"{}",
        "claims a header of 9223372036854775808",
    ),
    "a header past the end": (struct.pack("<Q", 1000) + b"{}", "ends at offset 1008"),
    "no JSON": (struct.pack("<Q", 4) + b"abcd", "no JSON"),
    "deep JSON": (struct.pack("<Q", 60_000) + b"[" * 60_000, "no JSON"),
    "no recording": (save({"weight": np.zeros(3, np.int8)}), "no padtrace"),
    "another safetensors file": (save({"w": np.zeros((2, 2), np.float32)}), "no column"),
    "a byte after the end": (writer.to_bytes(small_recording()) + b"\0", "1 bytes follow"),
    "a future format": (_future(), "format version is 2"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_words(tmp_path: Path, name: str) -> None:
    data, words = HOSTILE[name]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    with pytest.raises(BadRecordingError) as caught:
        reader.read(path)
    assert time.monotonic() - started < 5, "a refusal must not hang"
    assert words in str(caught.value)
    assert caught.value.exit_code == 3
    assert all("\n" not in line for line in caught.value.lines())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("path", ["nowhere.safetensors", "."])
def test_a_path_that_is_no_file(path: str) -> None:
    with pytest.raises(BadRecordingError, match="bad recording"):
        reader.read(Path(path))


def _resealed(change: Any) -> bytes:
    """A file whose digests are right although its content was changed: a forger's work."""
    recording = small_recording()
    tensors = load(writer.to_bytes(recording))
    header = writer.to_bytes(recording)
    length = struct.unpack("<Q", header[:8])[0]
    texts: dict[str, str] = json.loads(header[8 : 8 + length])["__metadata__"]
    change(tensors, texts)
    texts["digests"] = json.dumps({n: writer.digest(t.tobytes()) for n, t in tensors.items()})
    texts["metadata_digest"] = writer.metadata_digest(texts)
    return save(tensors, metadata=texts)


def _set(tensors: dict[str, Any], name: str, values: list[int]) -> None:
    tensors[name] = np.array(values, dtype=np.int8)


def _tables(texts: dict[str, str], table: str, **values: Any) -> None:
    tables = json.loads(texts["tables"])
    tables[table].update(values)
    texts["tables"] = json.dumps(tables)


def _column(texts: dict[str, str], name: str, **values: Any) -> None:
    table, _, column = name.partition("/")
    tables = json.loads(texts["tables"])
    tables[table]["columns"][column].update(values)
    texts["tables"] = json.dumps(tables)


FORGED = {
    "the same as itself": lambda t, x: _column(
        x, "pad/num_tokens", encoding="same", **{"as": "pad/num_tokens"}
    ),
    "the same as an unknown table": lambda t, x: _column(
        x, "pad/worker", encoding="same", **{"as": "elsewhere/worker"}
    ),
    "the same as nothing": lambda t, x: _column(
        x, "pad/worker", encoding="same", **{"as": "pad/nowhere"}
    ),
    "the same as a table with other rows": lambda t, x: _column(
        x, "pad/worker", encoding="same", **{"as": "forward/worker"}
    ),
    "the same without saying as what": lambda t, x: _column(x, "pad/worker", encoding="same"),
    "an index outside the vectors": lambda t, x: _set(t, "vector/offsets", [0, 1, 2, 99]),
    "offsets that fall": lambda t, x: _set(t, "vector/offsets", [0, 2, 1, 4]),
    "rows that nothing proves": lambda t, x: _tables(x, "pad", rows=10**12),
    "negative rows": lambda t, x: _tables(x, "pad", rows=-1),
    "a table with other rows": lambda t, x: _tables(x, "pad", rows=3),
    "no strings": lambda t, x: x.update(strings="[]"),
    "strings that are numbers": lambda t, x: x.update(strings="[1,2]"),
    "facts for another process count": lambda t, x: x.update(facts="[]"),
    "metadata that lack their tables": lambda t, x: x.pop("tables"),
    "an unknown encoding": lambda t, x: x.update(tables=x["tables"].replace("constant", "magic")),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_files_are_refused(name: str) -> None:
    with pytest.raises(BadRecordingError) as caught:
        reader.from_bytes(_resealed(FORGED[name]), "forged")
    assert caught.value.hint


def test_a_forger_without_change_is_read() -> None:
    """The helper above really reseals: otherwise the test before would prove nothing."""
    read = reader.from_bytes(_resealed(lambda tensors, texts: None), "resealed")
    assert isinstance(read, Recording)
    assert list(read.events()) == list(small_recording().events())


def test_a_snapshot_whose_list_was_edited_is_another_row() -> None:
    builder = RecordingBuilder({"source": "made"})
    counts = [3, 1]
    first = builder.snapshot_row({"batch_size": 2, "global_num_tokens_cpu": counts})
    counts[0] = 4
    second = builder.snapshot_row({"batch_size": 2, "global_num_tokens_cpu": counts})
    third = builder.snapshot_row({"batch_size": 2})
    recording = builder.finish()
    held = [recording.snapshot(row)["global_num_tokens_cpu"] for row in (first, second, third)]
    assert held == [[3, 1], [4, 1], Absent.NOT_OBSERVED]
