"""The bounded file of tensor values: what was put comes back, the newest stay, damage is seen."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from padtrace.record.device_values import layout
from padtrace.record.device_values.staging import Spans
from padtrace.record.device_values.values_file import ValuesFile
from padtrace.record.ring_file import RingUnavailable
from padtrace.record.values_reader import KeptValues, read_values

INT64 = layout.DTYPES.index("int64")
SIZE = 1 << 20
BIG = 8192  # int64, 64 KiB: less than an eighth of a half of 1 MiB


def put(file: ValuesFile, seq: int, values: list[int], name: str = "exit.seq_lens") -> None:
    file.put(seq, name, INT64, (len(values),), memoryview(struct.pack(f"<{len(values)}q", *values)))


def sequence(kept: KeptValues) -> list[int]:
    return sorted(key.enter_seq for key in kept.tensors)


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    file = ValuesFile.create(tmp_path / "a.values", SIZE)
    put(file, 7, [3, -1, 1 << 40])
    data = struct.pack("<4h", 0x3F80, 0, -1, 1)
    file.put(9, "q", layout.DTYPES.index("bfloat16"), (2, 2), memoryview(data))
    put(file, 11, [])
    kept = read_values(file.path, 5)
    assert kept.problem == ""
    found = {key.name: (value.data.tolist(), value.dtype) for key, value in kept.tensors.items()}
    assert found == {
        "values/5/7/exit.seq_lens": ([3, -1, 1 << 40], "int64"),
        "values/5/9/q": ([[0x3F80, 0], [-1, 1]], "bfloat16"),
        "values/5/11/exit.seq_lens": ([], "int64"),
    }
    assert kept.counters == {"kept": 3, "dropped": 0, "overwritten": 0, "failed": 0}
    assert oct(file.path.stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("count", [1, 6, 7, 8, 14, 15, 100])
def test_a_full_file_keeps_the_newest(tmp_path: Path, count: int) -> None:
    file = ValuesFile.create(tmp_path / "a.values", SIZE)
    # A record takes a little more than 64 KiB, a half is a little less than 512 KiB: 7 fit.
    for number in range(count):
        put(file, number, [number] * 8000)
    kept = read_values(file.path, 0)
    found = sequence(kept)
    assert found == list(range(count - len(found), count))
    assert len(found) >= min(count, 8)
    assert all(value.data.tolist() == [k.enter_seq] * 8000 for k, value in kept.tensors.items())
    assert kept.counters["kept"] - kept.counters["overwritten"] == len(found)
    assert kept.counters["dropped"] == 0


def test_with_policy_first_the_oldest_stay(tmp_path: Path) -> None:
    file = ValuesFile.create(tmp_path / "a.values", SIZE, keep_first=True)
    for number in range(100):
        put(file, number, [number] * 8000)
    kept = read_values(file.path, 0)
    found = sequence(kept)
    assert found == list(range(len(found)))
    assert kept.counters == {
        "kept": len(found),
        "dropped": 100 - len(found),
        "overwritten": 0,
        "failed": 0,
    }


def test_what_is_too_large_is_dropped(tmp_path: Path) -> None:
    file = ValuesFile.create(tmp_path / "a.values", SIZE)
    put(file, 1, [0] * (file.largest // 8 + 1))
    put(file, 2, [1])
    kept = read_values(file.path, 0)
    assert sequence(kept) == [2]
    assert kept.counters["dropped"] == 1


def test_a_flipped_byte_ends_its_half(tmp_path: Path) -> None:
    file = ValuesFile.create(tmp_path / "a.values", SIZE)
    for number in range(3):
        put(file, number, [number] * 100)
    data = bytearray(file.path.read_bytes())
    where = data.index(struct.pack("<3q", 1, 1, 1))
    data[where] ^= 4
    file.path.write_bytes(data)
    assert sequence(read_values(file.path, 0)) == [0]


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"x" * SIZE])
def test_another_file_is_a_problem_and_no_exception(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "a.values"
    path.write_bytes(damage)
    kept = read_values(path, 0)
    assert kept.problem
    assert kept.tensors == {}


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.binary(max_size=40)), max_size=6))
def test_damage_never_raises_and_invents_nothing(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, bytes]]
) -> None:
    path = tmp_path_factory.mktemp("v") / "a.values"
    file = ValuesFile.create(path, SIZE // 4)
    for number in range(30):
        put(file, number, [number] * 500)
    data = bytearray(path.read_bytes())
    for offset, replaced in damage:
        start = offset % (len(data) - 64)
        data[start : start + len(replaced)] = replaced
    path.write_bytes(data)
    for key, value in read_values(path, 0).tensors.items():
        assert value.data.tolist() == [key.enter_seq] * 500


def test_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RingUnavailable):
        ValuesFile.create(tmp_path / "missing" / "a.values", SIZE)
    (tmp_path / "a.values").write_text("an earlier one")
    with pytest.raises(RingUnavailable):
        ValuesFile.create(tmp_path / "a.values", SIZE)
    assert (tmp_path / "a.values").read_text() == "an earlier one"


@given(st.lists(st.one_of(st.integers(0, 3000), st.none()), max_size=80))
def test_spans_never_overlap(steps: list[int | None]) -> None:
    spans = Spans(8192)
    taken: list[tuple[int, int]] = []
    for step in steps:
        if step is None:
            if taken:
                assert spans.release() == taken.pop(0)[0]
            continue
        start = spans.reserve(step)
        if start is None:
            assert taken, "an empty block has room"
            continue
        assert 0 <= start <= start + step <= 8192
        assert all(start + step <= a or b <= start for a, b in taken)
        taken.append((start, start + max(step, 1)))
