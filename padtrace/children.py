"""The one way in which padtrace starts, watches and ends another process.

Whatever a child is for: it runs in a folder of its own, which nobody else can write and which goes
with it, unless a folder is named; what it starts itself ends with it; it leaves no zombie. A Python
interpreter among them gets `python_command` and `python_environment`, so that no folder it happens
to run in or beside can give it a module.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, overload

from padtrace.errors import EnvironmentMissingError, UsageError

OnLine = Callable[[str], None]

_KEPT_LINES = 40
_SHOWN_LINES = 3
_LINE_BYTES = 4096
# What binding libraries say of their own objects when any process with them ends.
_NOISE = re.compile(
    r"nanobind: (leaked|this is likely)| - leaked | - \.\.\. skipped|See https://nanobind"
)
# A line that has no end yet is passed on in parts of this size.
_MAX_LINE_BYTES = 1 << 20
_FOLLOW_SECONDS = 0.1
# For a reader of lines that makes no progress, such as a terminal that was stopped.
_DRAIN_SECONDS = 2.0
_KILL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Pipes:
    """Stdin and stdout are ours to write and read; of stderr the last words are kept."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Stdout and stderr in one, each line given to `on_line` without its end, in a thread."""

    on_line: OnLine


@dataclass(frozen=True, slots=True)
class Log:
    """Stdout and stderr go to a file (0600) that the child itself writes, whatever becomes of us.

    Attributes:
        path: of the file; replaced.
        on_line: gets each line, without its end, in a thread that follows the file.
    """

    path: Path
    on_line: OnLine | None = None


Streams = Pipes | Lines | Log


def python_command(python: str | Path, *arguments: str) -> list[str]:
    """The command of a Python (3.11 or newer) that imports nothing from where it happens to run."""
    return [str(python), "-P", *arguments]


def python_environment(base: Mapping[str, str], *path: Path) -> dict[str, str]:
    """Variables under which an interpreter, and each one it starts, imports only what it should.

    Args:
        base: usually `os.environ`.
        path: all that PYTHONPATH will hold; what `base` has there is the caller's, not ours.
    """
    variables = {**base, "PYTHONSAFEPATH": "1"}
    variables.pop("PYTHONPATH", None)
    if path:
        variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return variables


class Child:
    """A process that was started here; as a context manager it has ended when the block is left.

    Args:
        command: the program and its arguments; a relative program is one of this folder.
        environment: all its variables; by default this process's.
        folder: where it runs; by default in a fresh private folder that is removed at its end.
        streams: where its output goes; by default where this process writes. Stdin is empty except
            with `Pipes`.
        session: whether it leads a session of its own, which keys of the terminal do not reach.

    Attributes:
        late: the seconds of `within` that were not enough, or 0.

    Raises:
        EnvironmentMissingError: it cannot be started.
        UsageError: its log cannot be written.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        streams: Streams | None = None,
        session: bool = False,
    ) -> None:
        program = os.path.abspath(command[0]) if os.sep in command[0] else command[0]
        self.late = 0.0
        self._session = session
        self._reader: _Reader | None = None
        self._last_words: _LastWords | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        output, error_output = _outputs(streams)
        try:
            if folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="padtrace-")
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.PIPE if isinstance(streams, Pipes) else subprocess.DEVNULL,
                stdout=output,
                stderr=error_output,
                env=None if environment is None else dict(environment),
                cwd=folder if self._folder is None else self._folder.name,
                start_new_session=session,
            )
        except OSError as error:
            self._remove_folder()
            raise EnvironmentMissingError(
                f"cannot start {command[0]}", str(error.strerror), "choose another interpreter"
            ) from error
        finally:
            if isinstance(streams, Log) and isinstance(output, int):
                os.close(output)
        self._listen(streams)

    def _listen(self, streams: Streams | None) -> None:
        if isinstance(streams, Pipes):
            self._last_words = _LastWords(_stream(self._process.stderr))
        elif isinstance(streams, Lines):
            self._reader = _Reader(_stream(self._process.stdout), streams.on_line, following=False)
        elif isinstance(streams, Log) and streams.on_line is not None:
            self._reader = _Reader(streams.path.open("rb"), streams.on_line, following=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def incoming(self) -> Any:
        """Its stdin, with `Pipes`."""
        return _stream(self._process.stdin)

    @property
    def outgoing(self) -> Any:
        """Its stdout, with `Pipes`."""
        return _stream(self._process.stdout)

    def poll(self) -> int | None:
        """The exit code (128 + signal when it was killed), or None while it runs."""
        return _as_shells_say(self._process.poll())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def killed_by(self) -> int | None:
        """The signal that ended it; None where it runs or ended by itself."""
        code = self._process.poll()
        return -code if code is not None and code < 0 else None

    @overload
    def wait(self) -> int: ...

    @overload
    def wait(self, seconds: float) -> int | None: ...

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code as `poll` gives it, or None if it still runs after `seconds`."""
        try:
            return _as_shells_say(self._process.wait(seconds))
        except subprocess.TimeoutExpired:
            return None

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Kill it where the block takes longer, which ends every wait for it."""
        timer = threading.Timer(seconds, self._too_late, (seconds,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _too_late(self, seconds: float) -> None:
        self.late = seconds
        self.kill()

    def last_words(self) -> str:
        """The last lines of its stderr, in one; with `Pipes`, to be asked when it has ended."""
        return self._last_words.text() if self._last_words is not None else "nothing was kept"

    def signal(self, number: int) -> bool:
        """Send a signal to the process itself; False if it has ended."""
        if not self.alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return True

    def signal_all(self, number: int) -> bool:
        """Send a signal to it and to what it started; False if there is none of them left."""
        family = self._family()
        grouped = self._session and self.alive
        if grouped:
            # All of the group at once, also those that start more in the meantime.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        for pid in family:
            if not (grouped and _group(pid) == self.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        return bool(family)

    def others(self) -> list[int]:
        """What it started and is still there."""
        return [pid for pid in self._family() if pid != self.pid]

    def kill(self) -> None:
        """SIGKILL to it and to what it started; until there is none left, since they may fork."""
        deadline = time.monotonic() + _KILL_SECONDS
        while self.signal_all(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.01)

    def end(self, *, patience: float = 0.0, grace: float = 0.0) -> int:
        """End it with all that it started, take in what it wrote, remove its folder.

        Args:
            patience: seconds it has to end by itself, after what it was told.
            grace: seconds it has after SIGTERM, before SIGKILL.

        Returns:
            The exit code as `poll` gives it.
        """
        if patience:
            self.wait(patience)
        if grace and self.signal(signal.SIGTERM):
            self.wait(grace)
        self.kill()
        code = self.wait()
        if self._reader is not None:
            self._reader.drain()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and (self._reader is None or not self._reader.is_alive()):
                with contextlib.suppress(OSError):
                    stream.close()
        self._remove_folder()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.cleanup()

    def _family(self) -> list[int]:
        """It, what descends from it, and what lies in its session; no zombies."""
        alive = self.alive
        if not alive and not self._session:
            return []  # its number may be another's by now
        found = {self.pid} if alive else set()
        processes = list(_processes())
        while True:
            more = {
                pid
                for pid, parent, session in processes
                if parent in found or (self._session and session == self.pid)
            } - found
            if not more:
                return sorted(found)
            found |= more


def run(
    command: Sequence[str], on_line: OnLine, *, environment: Mapping[str, str] | None = None
) -> int:
    """Run a command to its end in a private folder; its exit code (128 + signal).

    Args:
        on_line: gets each line of its output, stdout and stderr in one.
    """
    with Child(command, environment=environment, streams=Lines(on_line), session=True) as child:
        return child.wait()


def answer(
    command: Sequence[str],
    seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[int, bytes, str]:
    """Run a command that must end soon; its exit code, its stdout, the last words of stderr."""
    with Child(command, environment=environment, folder=folder, streams=Pipes()) as child:
        child.incoming.close()
        with child.within(seconds):
            output: bytes = child.outgoing.read()
            code = child.wait()
        words = child.last_words()
    return code, output, f"no answer within {child.late:g} seconds" if child.late else words


class _LastWords:
    """Reads a stream to its end in the background, so that its writer never waits."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """The last lines that are not blank, in one."""
        self._thread.join(timeout=2)
        shown = [line for line in list(self._lines) if line][-_SHOWN_LINES:]
        return " | ".join(shown) or "it wrote nothing"

    def _read(self) -> None:
        with self._stream:
            while line := self._stream.readline(_LINE_BYTES):
                text = line.decode(errors="replace").rstrip()
                if not _NOISE.match(text):
                    self._lines.append(text)


class _Reader:
    """Passes lines on in the background: of a pipe, or of a file that somebody still writes."""

    def __init__(self, stream: IO[bytes], on_line: OnLine, *, following: bool) -> None:
        self._stream = stream
        self._on_line = on_line
        self._following = following
        self._ended = threading.Event()
        self._passed = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def drain(self) -> None:
        """Pass on what is left once nobody writes any more; gives up on one who takes nothing."""
        self._ended.set()
        while self._thread.is_alive():
            before = self._passed
            self._thread.join(_DRAIN_SECONDS)
            if self._passed == before:
                return

    def _read(self) -> None:
        rest = b""
        with self._stream:
            while True:
                # Asked before the read: what was written before the end is then read as well.
                ended = self._ended.is_set() or not self._following
                part = self._stream.readline(_MAX_LINE_BYTES)
                rest += part
                if rest and (rest.endswith(b"\n") or len(rest) >= _MAX_LINE_BYTES):
                    self._pass_on(rest)
                    rest = b""
                elif part or self._was_emptied():
                    continue
                elif ended:
                    break
                else:
                    self._ended.wait(_FOLLOW_SECONDS)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        # Reading goes on whatever happens, or the writer of a pipe waits for us.
        with contextlib.suppress(Exception):
            self._on_line(line.decode("utf-8", "replace").rstrip("\r\n"))
        self._passed += 1

    def _was_emptied(self) -> bool:
        """Somebody may empty a log that grows too large; what follows is read from its start."""
        if not self._following or os.fstat(self._stream.fileno()).st_size >= self._stream.tell():
            return False
        self._stream.seek(0)
        return True


def _outputs(streams: Streams | None) -> tuple[int | None, int | None]:
    """What `Popen` takes for stdout and stderr."""
    if streams is None:
        return None, None
    if isinstance(streams, Pipes):
        return subprocess.PIPE, subprocess.PIPE
    if isinstance(streams, Lines):
        return subprocess.PIPE, subprocess.STDOUT
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    try:
        return os.open(streams.path, flags, 0o600), subprocess.STDOUT
    except OSError as error:
        raise UsageError(
            f"cannot write the log {streams.path}", str(error.strerror), "choose another place"
        ) from error


def _processes() -> Iterator[tuple[int, int, int]]:
    """Process id, parent and session of every process but zombies; none where there is no /proc."""
    try:
        entries = os.listdir("/proc")
    except OSError:
        return
    for entry in entries:
        if entry.isdecimal():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
                if len(fields) > 3 and fields[0] not in "ZX":
                    yield int(entry), int(fields[1]), int(fields[3])


def _group(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


def _as_shells_say(code: int | None) -> int | None:
    return 128 - code if code is not None and code < 0 else code


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
