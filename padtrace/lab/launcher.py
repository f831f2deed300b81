"""The process of a lab server: start it, wait for it, ask it, end it.

Talks to 127.0.0.1 only. See `padtrace.lab.environment` for what the server is started with.
"""

import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from padtrace.children import Child, Log, python_command
from padtrace.errors import EnvironmentMissingError
from padtrace.lab.environment import LabSetup

_READY = "The server is fired up and ready to roll!"
_CRASHED = "Scheduler hit an exception"
_STANDINS = "padtrace lab: process"
_NOT_INSTALLED = "padtrace lab: stand-ins not installed"
# "RuntimeError: ...", also behind the prefix of SGLang's logger.
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\] )?([\w.]*(?:Error|Exception|SystemExit)\b.*)$")
_LOST_PEER = "Connection closed by peer"  # gloo
_POLL_SECONDS = 0.2
_STOP_SECONDS = 20.0
# A crashing scheduler logs first and takes the others with it a little later. The first process
# then sleeps some seconds more, to let a GPU settle; that is not worth waiting for.
_LAST_WORDS_SECONDS = 1.0
_DEATH_NOTICE_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """How a start ended: state, seconds it took, and for a failure the last error in the log."""

    state: Literal["ready", "died", "timeout"]
    seconds: float
    reason: str = ""


class LabServerError(EnvironmentMissingError):
    """The lab server did not start, or is gone."""


def wait_until_ready(process: Child, log_path: Path, timeout: float) -> Outcome:
    """Wait until the server says it serves, ends, or `timeout` seconds have passed."""
    started = time.monotonic()
    while True:
        seconds = time.monotonic() - started
        log = _read(log_path)
        if _READY in log:
            return Outcome("ready", seconds)
        if process.poll() is not None or _CRASHED in log:
            process.wait(_LAST_WORDS_SECONDS)
            return Outcome("died", seconds, reason_of_death(_read(log_path)))
        if seconds > timeout:
            return Outcome("timeout", seconds, f"not ready after {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)


def reason_of_death(log: str) -> str:
    """The error a server died of, as one line from its log.

    The first error of the first scheduler traceback, since what other processes log later only
    follows from it; without such a traceback the last error line, or the last line at all.
    """
    if _NOT_INSTALLED in log:
        return _NOT_INSTALLED + log.partition(_NOT_INSTALLED)[2].partition("\n")[0]
    if _STANDINS not in log:
        return (
            "the lab's stand-ins were not loaded: padtrace is not installed in the server's "
            "interpreter, or the server ended before it loaded plugins"
        )
    _, crash, after = log.partition(_CRASHED)
    errors = [
        match[1]
        for line in (after if crash else log).splitlines()
        if (match := _ERROR_LINE.match(line))
    ]
    # Ranks that lose a crashed one fail too, in the order the kernel wakes them.
    errors = [error for error in errors if _LOST_PEER not in error] or errors
    if not errors:  # such as a refused argument: the last thing said
        said = [line for line in log.splitlines() if line.strip()]
        return said[-1].strip() if said else "the log is empty"
    return errors[0] if crash else errors[-1]


class LabServer:
    """A lab server as a context manager; on exit its whole process group is ended.

    Entering starts the process and returns at once; call `wait_until_ready` next.
    """

    def __init__(
        self,
        setup: LabSetup,
        *,
        log_path: Path,
        python: str = sys.executable,
        extra_environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a server; nothing is started yet.

        Args:
            log_path: file for the output of all its processes; replaced.
            python: interpreter with padtrace and SGLang's packages.
            extra_environment: further variables, such as a recorder's; what it has for PYTHONPATH
                comes after the lab's own.
        """
        self.port = setup.port
        self.log_path = log_path
        self.command = python_command(python, "-m", "sglang.launch_server", *setup.arguments())
        extra = dict(extra_environment or {})
        path = extra.pop("PYTHONPATH", "")
        self.environment = setup.environment({**os.environ, **extra})
        if path:
            self.environment["PYTHONPATH"] += os.pathsep + path
        self._process: Child | None = None

    @property
    def process(self) -> Child:
        """The server's first process, leader of the group all others belong to."""
        if self._process is None:
            raise LabServerError("the lab server was not started", hint="Use it in a with block.")
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server in a session of its own, so that `stop` reaches all its processes."""
        self._process = Child(
            self.command, environment=self.environment, streams=Log(self.log_path), session=True
        )

    def wait_until_ready(self, timeout: float = 300.0) -> Outcome:
        """See the function `wait_until_ready`."""
        return wait_until_ready(self.process, self.log_path, timeout)

    def wait_until_dead(self, timeout: float) -> Outcome:
        """Wait for the death of a server that was ready; state "ready" if it still lives."""
        started = time.monotonic()
        while (seconds := time.monotonic() - started) <= timeout:
            if self.process.poll() is not None or _CRASHED in _read(self.log_path):
                self.process.wait(_LAST_WORDS_SECONDS)
                return Outcome("died", seconds, reason_of_death(_read(self.log_path)))
            time.sleep(_POLL_SECONDS)
        return Outcome("ready", seconds)

    def request(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int = 4,
        timeout: float = 120.0,
        **fields: Any,
    ) -> dict[str, Any]:
        """Generate greedily from token ids and return the server's JSON answer.

        fields: further fields of the request, such as SGLang's `routed_dp_rank`. Raises
        LabServerError with the reason when the server dies meanwhile or refuses.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"input_ids": list(input_ids), "sampling_params": sampling, **fields}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        # An opener without proxies: whatever the environment says, this stays on the machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as answer:
                result: dict[str, Any] = json.load(answer)
                return result
        except urllib.error.HTTPError as error:
            refusal = error.read().decode(errors="replace")
            raise LabServerError("the lab server refused a request", refusal[:500]) from error
        except OSError as error:
            outcome = self.wait_until_dead(timeout=_DEATH_NOTICE_SECONDS)
            why = outcome.reason if outcome.state == "died" else str(error)
            raise LabServerError(
                "the lab server did not answer", why, f"Its log is {self.log_path}."
            ) from error

    def stop(self, *, gracefully: bool = False) -> int:
        """End the process group and return the exit code of the server's first process.

        gracefully: ask by SIGTERM first, which SGLang takes 5 s and more to follow.
        """
        if gracefully:
            self.process.signal_all(signal.SIGTERM)
            self.process.wait(_STOP_SECONDS)
        return self.process.end()


def run_lab(
    setup: LabSetup,
    *,
    log_path: Path,
    start_timeout: float = 600.0,
    say: Callable[[str], None] = print,
) -> int:
    """Serve until the server ends or the user interrupts; for `padtrace lab --no-record`.

    Returns the server's own exit code, 0 after an interrupt. Raises LabServerError when the server
    does not come up.
    """
    server = LabServer(setup, log_path=log_path)
    say(f"Starting {setup.model} with {setup.tp} ranks; its log is {log_path}.")
    with server:
        outcome = server.wait_until_ready(start_timeout)
        if outcome.state != "ready":
            raise LabServerError(
                f"the lab server did not come up ({outcome.state} after {outcome.seconds:.0f} s)",
                outcome.reason,
                f"Its log is {log_path}.",
            )
        say(f"Ready after {outcome.seconds:.0f} s at http://127.0.0.1:{setup.port}; Ctrl-C ends.")
        try:
            return server.process.wait()
        except KeyboardInterrupt:
            return 0


def _read(log_path: Path) -> str:
    try:
        return log_path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
