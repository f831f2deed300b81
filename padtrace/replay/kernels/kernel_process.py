"""The worker's side of the kernel process: starts it, asks it, outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

import padtrace
from padtrace.children import Child, Pipes, python_command, python_environment
from padtrace.errors import EnvironmentMissingError, PadtraceError
from padtrace.replay import protocol, visible_devices
from padtrace.replay.kernels.launch import LaunchResult
from padtrace.replay.kernels.launch_shapes import LaunchLimits, LaunchShapes, Outcome
from padtrace.replay.kernels.messages import MAX_FRAME_BYTES, Available, Judged, Launch

_MODULE = "padtrace.replay.kernels.process"
# A first import of torch with CUDA and of a wheel of kernels from a cold disk takes a minute.
_START_SECONDS = 300.0
_LAUNCH_SECONDS = 120.0
# From the end of its output to its exit; an abort may write a core in between.
_END_SECONDS = 30.0
# Each end costs the start of another process.
_MAX_ENDS = 32
# Signals that come from somebody else, not from what the process did.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_Answer = TypeVar("_Answer", Available, Judged)


class KernelProcess:
    """A FlashMLA implementation in a process of its own; a new one where a launch ended it.

    Args:
        kind: ``cuda`` or ``reference``.
        version: the SGLang release whose kernels are wanted.
        command: what to start instead of padtrace's own kernel process.
        launch_seconds: a launch that takes longer is interrupted.

    Attributes:
        name: of the implementation.
        reason: what was found: the card.

    Raises:
        EnvironmentMissingError: the implementation cannot be called here, or the process ended
            before it said so.
    """

    def __init__(
        self,
        kind: str,
        version: str,
        *,
        command: Sequence[str] | None = None,
        launch_seconds: float = _LAUNCH_SECONDS,
    ) -> None:
        own = python_command(sys.executable, "-u", "-m", _MODULE, kind, version)
        self._command = tuple(command or own)
        self._seconds = launch_seconds
        self._ends = 0
        self._process = _Process(self._command)
        self.name = self._process.found.name
        self.reason = self._process.found.reason

    @property
    def pid(self) -> int:
        """The process that answers now."""
        return self._process.pid

    def begin(self) -> None:
        """A new recording: what ended in the last one counts no more."""
        self._ends = 0

    def run(
        self, launch: LaunchShapes, *, seed: int = 0, limits: LaunchLimits | None = None
    ) -> LaunchResult:
        """Call the kernel in its process; the end of that process is a result as well.

        Raises:
            BadRecordingError: numbers that no launch can have.
        """
        launch.check()
        if not self._process.alive:
            if self._ends >= _MAX_ENDS:
                return self._without_answer(
                    launch, "not-called", f"{self._ends} launches ended the kernel process before"
                )
            try:
                self._process = _Process(self._command)
            except PadtraceError as error:
                self._ends += 1
                why = f"the kernel process does not start again: {error.why}"
                return self._without_answer(launch, "not-called", why)
        asked = Launch(shapes=launch, seed=seed, limits=limits or LaunchLimits())
        try:
            answer = self._process.ask(asked, self._seconds)
        except _EndedError as ended:
            self._ends += 1
            return self._without_answer(launch, ended.outcome, str(ended))
        if answer.last:
            self._ends += 1
            self._process.close()
        return _result(answer)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _without_answer(self, launch: LaunchShapes, outcome: Outcome, text: str) -> LaunchResult:
        return LaunchResult(
            kernel=self.name,
            outcome=outcome,
            stage=None,
            error=text,
            raw_error=text,
            q_rows=launch.q_rows,
            num_splits_rows=launch.splits_rows,
            num_splits=None,
            computed=False,
        )


def _result(answer: Judged) -> LaunchResult:
    return LaunchResult(
        kernel=answer.kernel,
        outcome=answer.outcome,
        stage=answer.stage,
        error=answer.error,
        raw_error=answer.raw_error,
        q_rows=answer.q_rows,
        num_splits_rows=answer.num_splits_rows,
        num_splits=answer.num_splits,
        computed=answer.computed,
        hazards=answer.hazards,
    )


class _EndedError(Exception):
    """The process ended, or was made to, before it answered."""

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(f"the kernel process ended: {why}")
        self.outcome: Outcome = outcome
        self.why = why


class _Process:
    """One process, from its start to its end."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = Child(command, environment=_environment(), streams=Pipes())
        try:
            with self._child.within(_START_SECONDS):
                self.found = self._receive(Available)
        except _EndedError as ended:
            raise EnvironmentMissingError(
                "the kernel process does not start", ended.why, "use --kernels reference"
            ) from None
        except PadtraceError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return not self._child.late and self._child.alive

    def ask(self, launch: Launch, seconds: float) -> Judged:
        """One launch, one answer.

        Raises:
            _EndedError: there came none.
            PadtraceError: the process refuses the message.
        """
        with self._child.within(seconds):
            # A process that died unasked shows in the answer, which does not come.
            with contextlib.suppress(OSError, ValueError):
                protocol.send(self._child.incoming, launch)
            return self._receive(Judged)

    def close(self) -> None:
        self._child.end()

    def _receive(self, wanted: type[_Answer]) -> _Answer:
        kinds: tuple[type[_Answer | protocol.Failed], ...] = (wanted, protocol.Failed)
        try:
            answer = protocol.receive(self._child.outgoing, *kinds, limit=MAX_FRAME_BYTES)
        except (EOFError, OSError):
            raise self._ended() from None
        except (msgspec.MsgspecError, ValueError) as error:
            self.close()
            raise _EndedError("interrupted", f"its answer is no message: {error}") from None
        if isinstance(answer, protocol.Failed):
            raise answer.as_error()
        return answer

    def _ended(self) -> _EndedError:
        stayed = self._child.wait(_END_SECONDS) is None
        number = self._child.killed_by
        code = self._child.end()
        words = self._child.last_words()
        if self._child.late:
            seconds = self._child.late
            return _EndedError("interrupted", f"no answer within {seconds:g} seconds; {words}")
        if stayed:
            return _EndedError("interrupted", f"it closed its output and stayed; {words}")
        if number in _FROM_OUTSIDE:
            name = signal.Signals(number).name
            return _EndedError("interrupted", f"killed from outside by {name}; {words}")
        return _EndedError("ended", f"{_exit(code, number)}; {words}")


def _exit(code: int, number: int | None) -> str:
    if number is None:
        return f"exit code {code}"
    try:
        return f"by {signal.Signals(number).name}"
    except ValueError:
        return f"by signal {number}"


def _environment() -> dict[str, str]:
    variables = dict(os.environ)
    visible_devices.restore(variables)
    # The worker interprets Triton's kernels, for it sees no GPU.
    variables.pop("TRITON_INTERPRET", None)
    # In a worker this is the folder that holds padtrace alone.
    return python_environment(variables, Path(padtrace.__file__).parent.parent)
