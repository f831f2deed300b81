"""Where a ring is kept: in the folder asked for only if a page of it can always be written."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from padtrace.record import filesystems, ring_file, shared_memory
from padtrace.record.device_values.values_file import ValuesFile
from padtrace.record.ring import EventWriter, RingUnavailable
from padtrace.record.ring_reader import read_ring
from padtrace.record.ring_search import find_rings, rings_in
from padtrace.record.seal import remove_sealed, seal
from tests.disks import fill, mounted
from tests.record.made_events import MadeRank, rank_facts
from tests.record.test_ring import READY, numbers, ready
from tests.record.test_sudden_death import kill_often

pytestmark = pytest.mark.real_place
ROOT = Path(__file__).resolve().parents[2]
KIB = 1024
# btrfs, ZFS and the like copy on write; of the rest nobody knows.
DOUBTFUL = [
    *("btrfs", "zfs", "bcachefs", "f2fs", "overlay", "xfs", "nfs4", "fuse.sshfs", "9p"),
    *("lustre", "gpfs", "cifs", "virtiofs", "hugetlbfs", "something-new", ""),
]

# Writes events while the disk fills, as fast as it can; a page that cannot be written kills it.
WRITE_ON_A_FULL_DISK = """
import os, sys
from pathlib import Path
from padtrace.record import filesystems
if sys.argv[2] == "trusting":
    filesystems.doubt = lambda handle: ""
from padtrace.record.ring import EventWriter
from tests.disks import fill
from tests.record.test_sudden_death import kill_often
from tests.record.test_ring import READY, ready
disk = Path(sys.argv[1])
writer = EventWriter.create(disk / "rings", size_bytes=8 << 20)
for number in range(100):
    writer.write(READY, ready(number))
fill(disk)
for number in range(100, 120_000):
    writer.write(READY, ready(number))
    if number % 30_000 == 0:
        os.sync()
writer.close()
print(writer.path, writer.moved, sep="\\n")
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir(mode=0o777)
    folder.chmod(0o1777)
    monkeypatch.setattr(shared_memory, "ROOT", folder)
    # It lies on a disk, of which nothing need be left to a server.
    monkeypatch.setattr(shared_memory, "KEEP_FREE", 0)
    return folder


@pytest.fixture
def kinds(memory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, str]:
    """What is found out about file systems, as stated here for a folder and what is below it."""
    stated = {memory: "tmpfs"}

    def kind_of(handle: int) -> str:
        where = Path(os.readlink(f"/proc/self/fd/{handle}"))
        found = [folder for folder in stated if where == folder or folder in where.parents]
        return stated[max(found, key=lambda folder: len(folder.parts))]

    monkeypatch.setattr(filesystems, "kind_of", kind_of)
    return stated


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of all files that the recorder maps."""
    folders: list[Path] = []
    real = ring_file.mmap.mmap

    class Watched(real):  # type: ignore[misc, valid-type]
        def __new__(cls, handle: int, *rest: object, **more: object) -> Watched:
            folders.append(Path(os.readlink(f"/proc/self/fd/{handle}")).parent)
            return real.__new__(cls, handle, *rest, **more)  # type: ignore[no-any-return]

    monkeypatch.setattr(ring_file.mmap, "mmap", Watched)
    return folders


def run(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def moved_ring(folder: Path) -> EventWriter:
    """A ring that was not kept in the folder asked for."""
    writer = EventWriter.create(folder, size_bytes=256 * KIB)
    writer.facts(rank_facts(tp_rank=0, tp_size=1, dp_size=1))
    for _ in MadeRank(writer, dp_size=1, attn_tp=1).forwards(3):
        pass
    return writer


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_nothing_is_mapped_where_a_page_is_in_doubt(
    tmp_path: Path, memory: Path, kinds: dict[Path, str], mapped: list[Path], kind: str
) -> None:
    kinds[tmp_path] = kind
    asked = tmp_path / "asked"
    writer = moved_ring(asked)
    ValuesFile.create(writer.path.with_suffix(".values"), 64 * KIB)
    assert mapped == [writer.path.parent, writer.path.parent]
    assert writer.path.parent.parent == memory
    assert (kind or "not known") in writer.moved
    assert [path.suffix for path in asked.iterdir()] == [".shm"]
    with pytest.raises(RingUnavailable, match="file system"):
        ValuesFile.create(asked / "a.values", 64 * KIB)
    assert len(mapped) == 2


@pytest.mark.parametrize("kind", ["ext2", "ext3", "ext4", "tmpfs", "ramfs"])
def test_a_file_system_that_writes_in_place_keeps_its_ring(
    tmp_path: Path, kinds: dict[Path, str], mapped: list[Path], kind: str
) -> None:
    kinds[tmp_path] = kind
    writer = moved_ring(tmp_path / "asked")
    assert (mapped, writer.moved) == ([tmp_path / "asked"], "")


def test_shared_memory_is_not_trusted_by_its_name(
    tmp_path: Path, memory: Path, kinds: dict[Path, str], mapped: list[Path]
) -> None:
    kinds.update({tmp_path: "overlay", memory: "overlay"})
    with pytest.raises(RingUnavailable):
        moved_ring(tmp_path / "asked")
    assert (mapped, list(memory.iterdir()), list((tmp_path / "asked").iterdir())) == ([], [], [])


def test_without_shared_memory_recording_is_refused_with_one_line(
    tmp_path: Path, memory: Path, kinds: dict[Path, str]
) -> None:
    memory.rmdir()
    kinds[tmp_path] = "btrfs"
    with pytest.raises(RingUnavailable) as caught:
        moved_ring(tmp_path / "asked")
    assert "\n" not in caught.value.reason
    assert all(word in caught.value.reason for word in ("btrfs", "PADTRACE_RING", "--shm-size"))


@pytest.mark.parametrize("refusal", ["allocate", "pointer", "map"])
def test_what_was_begun_in_shared_memory_is_taken_back(
    tmp_path: Path,
    memory: Path,
    kinds: dict[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kinds[tmp_path] = "btrfs"
    owner, name = {
        "allocate": (ring_file.os, "posix_fallocate"),
        "pointer": (shared_memory, "_write_new"),
        "map": (ring_file.mmap, "mmap"),
    }[refusal]
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(RingUnavailable, match="No space left on device"):
        moved_ring(tmp_path / "asked")
    monkeypatch.undo()
    assert (list(memory.iterdir()), list((tmp_path / "asked").iterdir())) == ([], [])


# A folder whose files can be allocated and mapped, and whose pages can then not be had: those of a
# file of huge pages where the machine keeps none.
TREACHEROUS = """
import mmap, os, sys
from pathlib import Path
from padtrace.record import filesystems, ring_file, shared_memory
asked, memory = Path(sys.argv[1]), Path(sys.argv[2])
shared_memory.ROOT, shared_memory.KEEP_FREE = memory, 0
real, HUGE, NO_RESERVE = mmap.mmap, 2 << 20, 0x4000
try:
    probe = os.memfd_create("probe", os.MFD_HUGETLB)
    os.ftruncate(probe, HUGE)
except OSError as error:
    print("skip", error); sys.exit(0)
if int(Path("/proc/sys/vm/nr_hugepages").read_text()):
    print("skip: this machine keeps huge pages"); sys.exit(0)
def treacherous(handle, size, flags=mmap.MAP_SHARED):
    if memory in Path(os.readlink(f"/proc/self/fd/{handle}")).parents:
        return real(handle, size, flags=flags)
    other = os.memfd_create("ring", os.MFD_HUGETLB)
    os.ftruncate(other, -(-size // HUGE) * HUGE)
    return real(other, size, flags=mmap.MAP_SHARED | NO_RESERVE)
ring_file.mmap.mmap = treacherous
def kind_of(handle):
    where = Path(os.readlink(f"/proc/self/fd/{handle}"))
    return "tmpfs" if where == memory or sys.argv[3] == "trusting" else "btrfs"
filesystems.kind_of = kind_of
from padtrace.record.ring import EventWriter
from tests.record.test_sudden_death import kill_often
from tests.record.test_ring import READY, ready
writer = EventWriter.create(asked, size_bytes=4 << 20)
for number in range(1000):
    writer.write(READY, ready(number))
writer.close()
print(writer.path)
"""


@pytest.mark.parametrize("native", ["0", "1"])
def test_a_disk_that_allocates_and_then_fails_kills_nobody(
    tmp_path: Path, memory: Path, native: str
) -> None:
    asked = tmp_path / "asked"
    done = run(TREACHEROUS, asked, memory, "as it is", PADTRACE_NATIVE=native)
    if done.stdout.startswith("skip"):
        pytest.skip(f"no file here fails after it was mapped: {done.stdout}")
    assert done.returncode == 0, done.stderr
    assert numbers(read_ring(Path(done.stdout.strip()))) == list(range(1000))
    # Had the folder been trusted, the process would have died.
    assert run(TREACHEROUS, asked, memory, "trusting").returncode == -signal.SIGBUS


@pytest.mark.parametrize("native", ["0", "1"])
def test_a_full_btrfs_kills_nobody(tmp_path: Path, native: str) -> None:
    with mounted("btrfs", tmp_path) as disk:
        done = run(WRITE_ON_A_FULL_DISK, disk, "as it is", PADTRACE_NATIVE=native)
        assert done.returncode == 0, done.stderr
        path, reason = done.stdout.splitlines()
        assert path.startswith("/dev/shm/padtrace-")
        assert "btrfs" in reason
        sealed = seal([disk / "rings"])
        assert numbers(read_ring(Path(path)))[-1] == 119_999
        assert sealed.recording.coverage["in_shared_memory"] == {"0": reason}
        assert len(remove_sealed(sealed)) == 1
        assert not Path(path).parent.exists()
        assert list((disk / "rings").iterdir()) == []


def test_a_ring_on_a_full_btrfs_itself_would_kill(tmp_path: Path) -> None:
    with mounted("btrfs", tmp_path) as disk:
        done = run(WRITE_ON_A_FULL_DISK, disk, "trusting")
    if done.returncode == 0:
        pytest.skip("this kernel writes allocated pages on a full btrfs")
    assert done.returncode == -signal.SIGBUS


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "xfs"])
@pytest.mark.parametrize("native", ["0", "1"])
def test_a_ring_on_a_full_disk_loses_nothing(tmp_path: Path, kind: str, native: str) -> None:
    with mounted(kind, tmp_path) as disk:
        done = run(WRITE_ON_A_FULL_DISK, disk, "as it is", PADTRACE_NATIVE=native)
        assert done.returncode == 0, done.stderr
        path, reason = done.stdout.split("\n")[:2]
        assert (Path(path).parent, reason) == (disk / "rings", "")
        ring = read_ring(Path(path))
        kept = numbers(ring)
        assert kept == list(range(120_000 - len(kept), 120_000))
        assert (ring.damaged, ring.counters["events"], len(kept)) == (0, 120_000, ring.header.slots)


@pytest.mark.parametrize("kind", ["btrfs", "overlay", "xfs-reflink"])
def test_real_disks_that_are_not_trusted(tmp_path: Path, memory: Path, kind: str) -> None:
    with mounted(kind, tmp_path / "a") as disk, mounted("tmpfs", tmp_path / "b") as small:
        shared_memory.ROOT = small  # set back by the fixture
        writer = moved_ring(disk / "rings")
        assert writer.path.parent.parent == small
        assert kind.removesuffix("-reflink") in writer.moved
        assert rings_in(disk / "rings") == [writer.path]


def test_a_bind_mount_is_known_by_what_lies_behind_it(tmp_path: Path) -> None:
    behind = tmp_path / "bound"
    behind.mkdir()
    with mounted("btrfs", tmp_path) as disk:
        (disk / "part").mkdir()
        done = subprocess.run(["mount", "--bind", str(disk / "part"), str(behind)], check=False)
        if done.returncode:
            pytest.skip("nothing can be bind-mounted here")
        try:
            handle = os.open(behind, os.O_RDONLY)
            assert filesystems.kind_of(handle) == "btrfs"
            os.close(handle)
        finally:
            subprocess.run(["umount", "--lazy", str(behind)], check=True)


def test_shared_memory_too_small_for_a_ring_refuses_it(
    tmp_path: Path, memory: Path, kinds: dict[Path, str]
) -> None:
    with mounted("tmpfs", tmp_path / "m", mib=4) as small:
        shared_memory.ROOT = small
        # So that the kernel is asked, whatever it has left.
        shared_memory.KEEP_FREE = -9
        kinds.update({tmp_path: "btrfs", small: "tmpfs"})
        first = EventWriter.create(tmp_path / "asked", size_bytes=3 << 20)
        with pytest.raises(RingUnavailable, match="No space left on device"):
            EventWriter.create(tmp_path / "asked", size_bytes=3 << 20)
        assert rings_in(tmp_path / "asked") == [first.path]
        # What was allocated is really there: nobody can take it any more.
        fill(small)
        for number in range(20_000):
            first.write(READY, ready(number))
        assert numbers(read_ring(first.path))[-1] == 19_999


@pytest.mark.parametrize("named", [False, True])
def test_half_of_the_shared_memory_is_left_to_the_server(
    tmp_path: Path,
    kinds: dict[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
) -> None:
    """SGLang's own queues there are sparse: it dies where a page of theirs cannot be had."""
    monkeypatch.setattr(shared_memory, "KEEP_FREE", 0.5)
    with mounted("tmpfs", tmp_path / "m", mib=4) as small:
        shared_memory.ROOT = small
        kinds.update({tmp_path: "btrfs", small: "tmpfs"})
        asked = small / "rings" if named else tmp_path / "asked"
        first = EventWriter.create(asked, size_bytes=1 << 20)
        with pytest.raises(RingUnavailable, match="no room in shared memory"):
            EventWriter.create(asked, size_bytes=1536 * KIB)
        with pytest.raises(RingUnavailable, match="50% of it are left to the server"):
            ValuesFile.create(first.path.with_suffix(".values"), 1536 * KIB)
        assert rings_in(asked) == [first.path]
        (small / "queue").write_bytes(bytes(2 << 20))


def test_a_folder_that_is_read_only_is_a_reason(tmp_path: Path) -> None:
    with (
        mounted("tmpfs", tmp_path, options=",ro") as disk,
        pytest.raises(RingUnavailable, match="Read-only file system"),
    ):
        moved_ring(disk)


# Sealing.


@pytest.fixture
def moved(tmp_path: Path, memory: Path, kinds: dict[Path, str]) -> Path:
    """A folder whose rings are in shared memory."""
    kinds[tmp_path] = "btrfs"
    folder = tmp_path / "asked"
    folder.mkdir(mode=0o700)
    return folder


def ended(folder: Path) -> Path:
    """A ring whose process has ended without closing it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(moved_ring(folder).path).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        return Path(said.read())


def test_what_was_sealed_is_removed_and_the_rest_stays(moved: Path, memory: Path) -> None:
    gone, alive = ended(moved), moved_ring(moved)
    sealed = seal([moved])
    assert set(sealed.rings) == {gone, alive.path}
    said = remove_sealed(sealed)
    assert len(said) == 2
    assert not gone.parent.exists()
    assert any("still runs" in line for line in said)
    assert rings_in(moved) == [alive.path]


def test_rings_nobody_points_to_any_more_go_with_the_next_one(moved: Path, memory: Path) -> None:
    kept, forgotten, alive = ended(moved), ended(moved), moved_ring(moved)
    for ring in (forgotten, alive.path):
        (moved / f"{ring.stem}.shm").unlink()
    moved_ring(moved)
    assert (kept.exists(), forgotten.parent.exists(), alive.path.exists()) == (True, False, True)


def test_rings_of_another_container_are_left_alone(
    moved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = ended(moved)
    (moved / f"{ring.stem}.shm").unlink()
    monkeypatch.setattr(shared_memory, "_mounts", lambda: "mnt:[another]")
    moved_ring(moved)
    assert ring.exists()


def test_a_ring_that_a_restart_took_is_named(moved: Path, memory: Path) -> None:
    gone = ended(moved)
    moved_ring(moved)
    shared_memory._discard(os.open(memory, os.O_RDONLY), gone.parent.name, -1)
    for file in gone.parent.iterdir():
        file.unlink()
    gone.parent.rmdir()
    sealed = seal([moved])
    # By its process and its own number; of the machine only a label is told.
    ring = gone.stem.partition(".")[2]
    assert any(ring in note and "shared memory" in note for note in sealed.notes)


def test_32_processes_at_once_find_room_in_shared_memory(moved: Path, memory: Path) -> None:
    children = []
    for rank in range(32):
        child = os.fork()
        if child == 0:
            try:
                writer = EventWriter.create(moved, size_bytes=256 * KIB, run="many")
                writer.facts(rank_facts(tp_rank=rank, tp_size=32, dp_size=8))
                made = MadeRank(writer, dp_rank=rank // 4, dp_size=8, attn_tp=4)
                for _ in made.forwards(10):
                    pass
                writer.close()
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    sealed = seal([moved])
    assert (sealed.missing_ranks, sealed.left_out, sealed.damaged) == ([], [], [])
    process = sealed.recording.table("forward").column("process")
    assert [int((process == rank).sum()) for rank in range(32)] == [10] * 32
    assert len(remove_sealed(sealed)) == 32
    assert (list(moved.iterdir()), list(memory.iterdir())) == ([], [])


def test_kills_leave_what_was_written_in_shared_memory(moved: Path, memory: Path) -> None:
    kill_often(moved, 30, 22)
    assert list(memory.iterdir()) == []


HOSTILE = [
    b"",
    b"[" * 5000,
    b"\xff\xfe",
    b"[]",
    b'{"folder": 7}',
    b'{"folder": "../../etc"}',
    b'{"folder": "/etc"}',
    b'{"folder": "padtrace-0000000000000000/../x"}',
    b'{"folder": "padtrace-00000000000000zz"}',
    json.dumps({"folder": "padtrace-" + "0" * 16 + "\n"}).encode(),
    b'{"folder": "x"}' + b" " * 10_000,
]


@pytest.mark.parametrize("content", HOSTILE)
def test_a_pointer_to_anything_else_is_not_followed(
    moved: Path, tmp_path: Path, content: bytes
) -> None:
    stem = ended(moved).stem
    (moved / f"{stem}.shm").write_bytes(content)
    found = find_rings([moved])
    assert list(found.rings) == []
    assert len(found.problems) == 1


@pytest.mark.parametrize("trick", ["symlink", "mode", "owner", "ring", "file"])
def test_a_folder_that_is_not_ours_alone_is_not_used(
    moved: Path, memory: Path, tmp_path: Path, trick: str
) -> None:
    ring = ended(moved)
    folder = ring.parent
    if trick == "symlink":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif trick == "mode":
        folder.chmod(0o750)
    elif trick == "owner":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, 12345, -1)
    elif trick == "ring":
        ring.rename(tmp_path / "elsewhere")
        ring.symlink_to(tmp_path / "elsewhere")
    else:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        folder.write_bytes(b"")
    found = find_rings([moved])
    assert list(found.rings) == []
    pointed = shared_memory.Pointed(moved / f"{ring.stem}.shm", ring)
    if trick != "ring":
        assert not shared_memory.remove(pointed)


@pytest.mark.parametrize("kind", ["fifo", "symlink", "folder"])
def test_a_pointer_that_is_no_file_is_not_read(moved: Path, tmp_path: Path, kind: str) -> None:
    pointer = moved / f"{ended(moved).stem}.shm"
    real = tmp_path / "real"
    pointer.rename(real)
    if kind == "fifo":
        os.mkfifo(pointer)
    elif kind == "symlink":
        pointer.symlink_to(real)
    else:
        pointer.mkdir()
    assert list(find_rings([moved]).rings) == []
