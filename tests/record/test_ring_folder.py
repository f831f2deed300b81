"""A folder of rings that others can change is used by nobody: no recorder, no sealing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from padtrace import cli
from padtrace.errors import UsageError
from padtrace.record import filesystems, ring_folder
from padtrace.record.device_values.values_file import ValuesFile
from padtrace.record.ring import EventWriter, RingUnavailable
from padtrace.record.seal import seal
from padtrace.record.start import start
from padtrace.record.status import StatusReader
from tests.record.test_ring_place import moved_ring

NOBODY = 65534


def _mode(mode: int) -> Callable[[Path, pytest.MonkeyPatch], Path]:
    def change(folder: Path, patch: pytest.MonkeyPatch) -> Path:
        folder.chmod(mode)
        return folder

    return change


def _linked(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    link = folder.with_name("link")
    link.symlink_to(folder)
    return link


def _given_away(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """As if another user ran this: root can give the folder away, others cannot."""
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, -1)
    else:
        patch.setattr(ring_folder.os, "geteuid", lambda: NOBODY)
    return folder


REFUSED = {
    "everybody writes": (_mode(0o777), "other users can write to it"),
    "the group writes": (_mode(0o770), "other users can write to it"),
    "others write": (_mode(0o702), "other users can write to it"),
    "a symbolic link": (_linked, "symbolic link"),
    "another user's": (_given_away, "belongs to another user"),
}
USED = [0o700, 0o755, 0o750, 0o711, 0o1777, 0o1770, 0o2755]
refused = pytest.mark.parametrize("how", REFUSED)


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    folder = tmp_path / "rings"
    moved_ring(folder).close()
    return folder


@refused
def test_no_ring_is_made_there(rings: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    change, words = REFUSED[how]
    folder = change(rings, monkeypatch)
    before = sorted(rings.iterdir())
    with pytest.raises(RingUnavailable) as caught:
        EventWriter.create(folder, size_bytes=256 << 10)
    assert words in caught.value.reason
    assert "\n" not in caught.value.reason
    with pytest.raises(RingUnavailable):
        ValuesFile.create(folder / "a.values", 64 << 10)
    assert sorted(rings.iterdir()) == before


@refused
def test_a_server_runs_unrecorded_and_says_so_once(
    rings: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    change, words = REFUSED[how]
    monkeypatch.setenv("PADTRACE_RECORD", str(change(rings, monkeypatch)))
    assert not start()
    (line,) = [record.getMessage() for record in caplog.records]
    assert words in line
    assert "recording of this process is off" in line


@refused
def test_it_is_not_sealed(rings: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    change, words = REFUSED[how]
    folder = change(rings, monkeypatch)
    with pytest.raises(UsageError) as caught:
        seal([folder])
    assert words in caught.value.why
    assert len(caught.value.lines()) == 3
    assert StatusReader(folder).look().processes == 0


def test_the_command_says_it_in_three_lines(
    rings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rings.chmod(0o777)
    out = rings.parent / "out.safetensors"
    monkeypatch.setattr(sys, "argv", ["padtrace", "seal", str(rings), "-o", str(out)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "other users can write" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("mode", USED)
def test_a_folder_only_we_can_change_is_used(rings: Path, mode: int) -> None:
    rings.chmod(mode)
    moved_ring(rings)
    assert seal([rings]).recording.rows("process") == 2


def test_a_sticky_folder_above_it_is_fine(tmp_path: Path) -> None:
    parent = tmp_path / "shm"
    parent.mkdir()
    parent.chmod(0o1777)
    writer = moved_ring(parent / "rings")
    assert writer.path.parent.stat().st_mode & 0o777 == 0o700
    assert len(seal([parent / "rings"]).rings) == 1


def test_a_folder_swapped_after_the_look_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "rings"
    victim.mkdir()
    folder.mkdir(mode=0o700)

    def swap(handle: int) -> str:
        folder.rename(tmp_path / "first")
        folder.symlink_to(victim)
        return ""

    monkeypatch.setattr(filesystems, "doubt", swap)
    EventWriter.create(folder, size_bytes=256 << 10)
    assert list(victim.iterdir()) == []
    assert len(list((tmp_path / "first").iterdir())) == 1


def test_a_file_laid_where_the_ring_will_be_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rings"
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("padtrace.record.ring_file.secrets.token_hex", lambda size: "00" * size)
    name = EventWriter.create(folder, size_bytes=256 << 10).path.with_suffix(".new")
    name.symlink_to(victim)
    with pytest.raises(RingUnavailable, match="File exists"):
        EventWriter.create(folder, size_bytes=256 << 10)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_file_is_damaged_and_blocks_nobody(rings: Path, kind: str) -> None:
    odd = rings / "odd.ring"
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "folder":
        odd.mkdir()
    else:
        odd.symlink_to("/dev/zero")
    sealed = seal([rings])
    assert sealed.recording.rows("process") == 1
    assert any("no regular file" in note for note in sealed.notes)
