"""The server as a child process: a session of its own, its log passed on, signals forwarded."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from padtrace.children import Child, Streams

# How long a server may take to end after SIGTERM, and its other processes after the first.
GRACE_SECONDS = 60.0
_LEFTOVER_SECONDS = 10.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServerProcess:
    """A started server.

    Args:
        streams: where its output goes; with a log it writes on whatever becomes of this process.
        folder: where it runs; None for a private folder.

    Raises:
        EnvironmentMissingError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: Streams | None,
        folder: Path | None,
    ) -> None:
        with _interruptible_children():
            self._child = Child(
                command, environment=environment, folder=folder, streams=streams, session=True
            )
        self._interrupts = 0
        self._stopping_since: float | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait(self, seconds: float) -> int | None:
        """The exit code (128 + signal when killed), or None if it still runs after `seconds`."""
        since = self._stopping_since
        if since is not None and time.monotonic() - since > GRACE_SECONDS:
            self._child.signal_all(signal.SIGKILL)
        return self._child.wait(seconds)

    def stop(self) -> None:
        """Ask it to end; kill it when it does not within `GRACE_SECONDS`."""
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            self._child.signal(signal.SIGTERM)

    def finish(self) -> None:
        """After its first process has ended: wait for the others, end what stays, drain the log."""
        deadline = time.monotonic() + _LEFTOVER_SECONDS
        while self._child.others() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._child.end()

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
            self._child.signal_all(signal.SIGKILL)
            return
        # A server has no terminal to lose, so a hangup asks it to end like SIGTERM.
        forwarded = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self._child.signal(forwarded)


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
