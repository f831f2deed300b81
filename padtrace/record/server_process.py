"""The server as a child process: a session of its own, its log passed on, signals forwarded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

# How long a server may take to end after SIGTERM, and its other processes after the first.
GRACE_SECONDS = 60.0
_LEFTOVER_SECONDS = 10.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServerProcess:
    """A started server.

    Args:
        on_line: gets each line of the log, without its end; None lets the server write to where
            this process writes.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None] | None,
    ) -> None:
        pipe = subprocess.PIPE if on_line is not None else None
        with _interruptible_children():
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=subprocess.STDOUT if pipe is not None else None,
                start_new_session=True,
            )
        self._interrupts = 0
        self._stopping_since: float | None = None
        self._reader: threading.Thread | None = None
        if on_line is not None:
            self._reader = threading.Thread(target=self._pass_on, args=(on_line,), daemon=True)
            self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        """The exit code (128 + signal when killed), or None if it still runs after `seconds`."""
        since = self._stopping_since
        if since is not None and time.monotonic() - since > GRACE_SECONDS:
            self.signal_group(signal.SIGKILL)
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """Ask it to end; kill it when it does not within `GRACE_SECONDS`."""
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def signal_group(self, number: int) -> bool:
        """Send a signal to all its processes; False if there is none left."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def finish(self) -> None:
        """After its first process has ended: wait for the others, end what stays, drain the log."""
        deadline = time.monotonic() + _LEFTOVER_SECONDS
        while self._has_others() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.signal_group(signal.SIGKILL)
        if self._reader is not None:
            self._reader.join(2.0)

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP go to the server; the second one kills all of it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self.signal_group(signal.SIGKILL)
            return
        # A server has no terminal to lose, so a hangup asks it to end like SIGTERM.
        forwarded = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, forwarded)

    def _pass_on(self, on_line: Callable[[str], None]) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        for raw in stream:
            # The pipe must be read whatever happens, or the server blocks on its own log.
            with contextlib.suppress(Exception):
                on_line(raw.decode("utf-8", "replace").rstrip("\r\n"))

    def _has_others(self) -> bool:
        """Whether the session still has processes that are no zombies."""
        if not self.signal_group(0):
            return False
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with contextlib.suppress(OSError, IndexError), open(f"/proc/{entry}/stat") as file:
                    state, _, group = file.read().rpartition(")")[2].split()[:3]
                    if int(group) == self.pid and state not in "ZX":
                        return True
        return False


@contextlib.contextmanager
def _interruptible_children() -> Iterator[None]:
    """Children started here take SIGINT, also where this process was told to ignore it.

    A shell starts background jobs with SIGINT ignored, and ignoring is inherited; a signal that is
    caught is not, it goes back to its default in the child.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
