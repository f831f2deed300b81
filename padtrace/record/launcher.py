"""`padtrace record`: start SGLang's server with the recorder on, seal when it ends.

The server is the same `python -m sglang.launch_server` as without padtrace, with some environment
variables more; what is recorded lies in its rings, so it does not matter how it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padtrace.errors import EnvironmentMissingError, PadtraceError, UsageError
from padtrace.record import settings
from padtrace.record.seal import Sealed, seal
from padtrace.record.server_process import ServerProcess
from padtrace.record.status import Status, StatusReader
from padtrace.recording import writer
from padtrace.sharing.redact import redact_text
from padtrace.sharing.rule import kept_command

_MODULE = "sglang.launch_server"
_PLUGIN = "padtrace"
_PLUGINS_VARIABLE = "SGLANG_PLUGINS"
_PROBE = """
import importlib.metadata, importlib.util, json
points = importlib.metadata.entry_points(group="sglang.srt.plugins")
print(json.dumps({
    "sglang": importlib.util.find_spec("sglang") is not None,
    "padtrace": "padtrace" in {point.name for point in points},
}))
"""


@dataclass(frozen=True, slots=True)
class FirstError:
    """The first exception that left a hooked function, sealed while the server was still ending.

    Attributes:
        recording: the file, complete up to the error; the final seal replaces it.
        error_ns: when the error was recorded, ns since the epoch.
        seconds: from the error to the sealed file.
    """

    recording: Path
    error_ns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RecordResult:
    """How it ended.

    Attributes:
        exit_code: the server's own; 128 + signal when it was killed.
        recording: the sealed file; None if nothing could be sealed.
        size: of that file, in bytes.
        sealed: what sealing had to say; None if nothing could be sealed.
        problem: why nothing could be sealed.
        rings: the folder of the rings, where it was kept.
        next_command: what to run next.
        first_error: see `FirstError`; None if no error was seen while the server ran.
    """

    exit_code: int
    recording: Path | None
    size: int
    sealed: Sealed | None
    problem: PadtraceError | None
    rings: Path | None
    next_command: str
    first_error: FirstError | None = None


@dataclass(frozen=True, slots=True)
class StopAfter:
    """When to end the server: after so many forwards of the fastest rank, or so many seconds."""

    forwards: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the caller wants to hear; all from the main thread except `line`."""

    line: Callable[[str], None] | None = None
    status: Callable[[Status], None] | None = None
    first_error: Callable[[FirstError], None] | None = None


def parse_server_arguments(text: str) -> list[str]:
    """The arguments in `--server-args "..."`, split as a shell would.

    Raises:
        UsageError: a quotation mark is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            "the server arguments cannot be split", str(error), "close every quotation mark"
        ) from error


def parse_stop_after(text: str) -> StopAfter:
    """`500` is forwards; `90s`, `15m` and `2h` are time.

    Raises:
        UsageError: it is neither.
    """
    match = re.fullmatch(r"(\d{1,9})([smh]?)", text.strip())
    if match is None or int(match[1]) == 0:
        raise UsageError(
            f"cannot stop after {text!r}",
            "it is neither a number of forwards nor a time",
            "write it like 500 (forwards), 90s, 15m or 2h",
        )
    number = int(match[1])
    if not match[2]:
        return StopAfter(forwards=number)
    return StopAfter(seconds=float(number * {"s": 1, "m": 60, "h": 3600}[match[2]]))


def run_record(
    server_arguments: Sequence[str],
    *,
    out: Path,
    tier: str = "shape",
    ring_bytes: int = settings.DEFAULT_RING_BYTES,
    values_bytes: int = settings.DEFAULT_RING_BYTES,
    policy: str = "last",
    alarm: bool = True,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    rings: Path | None = None,
    stop_after: StopAfter | None = None,
    until_error: bool = False,
    callbacks: Callbacks | None = None,
    poll_seconds: float = 1.0,
) -> RecordResult:
    """Run a server to its end under the recorder and seal one recording into `out`.

    Args:
        server_arguments: what `python -m sglang.launch_server` gets.
        environment: the server's whole environment; by default this process's.
        ring_bytes, values_bytes: sizes of each process's ring and, with tiers meta and full, of
            its file of tensor values.
        rings: where the folder of the rings is made; by default in `out`.
        stop_after: end the server then.
        until_error: end the server after the first error.
        poll_seconds: how often the rings are looked at.

    Raises:
        UsageError: `out` cannot be written, or a setting makes no sense.
        EnvironmentMissingError: that interpreter has no SGLang, or no padtrace.
    """
    callbacks = callbacks or Callbacks()
    base = dict(os.environ if environment is None else environment)
    # Given by hand where several nodes are recorded as one.
    run = base.get(settings.RUN) or secrets.token_hex(6)
    variables = {
        settings.RUN: run,
        settings.TIER: tier,
        settings.RING: str(ring_bytes),
        settings.VALUES: str(values_bytes),
        settings.POLICY: policy,
        settings.ALARM: "1" if alarm else "0",
        **_allowed_plugins(base),
    }
    _check_settings(variables)
    _check_interpreter(python, base)
    folder = _make_ring_folder(rings or out)
    variables[settings.FOLDER] = str(folder)
    command = [python, "-m", _MODULE, *server_arguments]
    job = _Job(folder, run, out / _file_name(server_arguments), _about(command, tier))
    try:
        server = ServerProcess(command, {**base, **variables}, callbacks.line)
    except OSError as error:
        folder.rmdir()
        raise EnvironmentMissingError(
            f"cannot start {python}", str(error.strerror), "choose another interpreter"
        ) from error
    with server.forwarding_signals():
        code = _watch(server, job, callbacks, stop_after, until_error, poll_seconds)
        server.finish()
    return job.result(code)


class _Job:
    """The rings of one run on their way to one file."""

    def __init__(self, folder: Path, run: str, target: Path, about: dict[str, Any]) -> None:
        self.folder, self.run, self.target = folder, run, target
        self.about = about
        self.first_error: FirstError | None = None
        self._written = False

    def seal(self, **more: Any) -> tuple[Sealed, int]:
        """Write the file; later calls replace what earlier ones of this run wrote.

        Raises:
            PadtraceError: there is nothing to seal, or no room for the file.
        """
        sealed = seal([self.folder], run=self.run, about={**self.about, **more})
        if not self._written and self.target.exists():
            # Two recorders may start in the same second with the same model.
            unique = secrets.token_hex(3)
            self.target = self.target.with_name(f"{self.target.stem}-{unique}.safetensors")
        size = writer.write(sealed.recording, self.target, force=self._written)
        self._written = True
        return sealed, size

    def on_first_error(self) -> FirstError | None:
        try:
            sealed, _ = self.seal()
        except PadtraceError:
            return None
        errors = sealed.recording.table("error")
        if not errors.rows:
            return None
        error_ns = int(errors.column("t_ns").min())
        seconds = (time.time_ns() - error_ns) / 1e9
        self.first_error = FirstError(self.target, error_ns, max(seconds, 0.0))
        return self.first_error

    def result(self, code: int) -> RecordResult:
        try:
            sealed, size = self.seal(exit_code=code)
        except PadtraceError as problem:
            return self._unsealed(code, problem)
        rings: Path | None = self.folder
        if not sealed.damaged:
            shutil.rmtree(self.folder, ignore_errors=True)
            rings = None
        following = f"padtrace diff {shlex.quote(str(self.target))}"
        return RecordResult(
            code, self.target, size, sealed, None, rings, following, self.first_error
        )

    def _unsealed(self, code: int, problem: PadtraceError) -> RecordResult:
        with contextlib.suppress(OSError):
            # Goes only if it is empty.
            self.folder.rmdir()
        early = self.first_error.recording if self.first_error is not None else None
        if not self.folder.exists():
            return RecordResult(code, None, 0, None, problem, None, "padtrace doctor")
        following = (
            f"padtrace seal {shlex.quote(str(self.folder))} -o {shlex.quote(str(self.target))}"
        )
        return RecordResult(code, early, 0, None, problem, self.folder, following, self.first_error)


def _watch(
    server: ServerProcess,
    job: _Job,
    callbacks: Callbacks,
    stop_after: StopAfter | None,
    until_error: bool,
    poll_seconds: float,
) -> int:
    """Look at the rings until the server has ended; its exit code."""
    reader = StatusReader(job.folder, job.run)
    started = time.monotonic()
    error_seen = False
    while True:
        code = server.wait(poll_seconds)
        now = reader.look()
        if callbacks.status is not None:
            callbacks.status(now)
        if now.errors and not error_seen:
            error_seen = True
            found = job.on_first_error()
            if found is not None and callbacks.first_error is not None:
                callbacks.first_error(found)
            if until_error:
                server.stop()
        if code is not None:
            return code
        if stop_after is not None and _due(stop_after, now, time.monotonic() - started):
            server.stop()


def _due(stop_after: StopAfter, now: Status, seconds: float) -> bool:
    by_forwards = stop_after.forwards is not None and now.forwards >= stop_after.forwards
    return by_forwards or (stop_after.seconds is not None and seconds >= stop_after.seconds)


def _check_interpreter(python: str, environment: Mapping[str, str]) -> None:
    try:
        answer = subprocess.run(
            [python, "-c", _PROBE], env=dict(environment), capture_output=True, timeout=60
        )
        found = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise EnvironmentMissingError(
            f"cannot use the interpreter {python}", str(error), "choose another with --python"
        ) from error
    if not found["sglang"]:
        raise EnvironmentMissingError(
            "SGLang is missing",
            f"{python} cannot import sglang",
            "run padtrace record where the server runs, or choose --python",
        )
    if not found["padtrace"]:
        raise EnvironmentMissingError(
            "padtrace is not installed beside SGLang",
            f"{python} has no plugin named padtrace, so nothing would be recorded",
            f"{python} -m pip install padtrace",
        )


def _check_settings(variables: Mapping[str, str]) -> None:
    understood = settings.from_environment({**variables, settings.FOLDER: "."})
    if understood is not None and understood.problems:
        raise UsageError(
            "a setting of the recorder makes no sense",
            understood.problems[0],
            "correct it; `padtrace record --help` says what it can be",
        )


def _allowed_plugins(base: Mapping[str, str]) -> dict[str, str]:
    """A list of allowed plugins that does not name this one would keep it out."""
    allowed = base.get(_PLUGINS_VARIABLE, "")
    if not allowed or _PLUGIN in (name.strip() for name in allowed.split(",")):
        return {}
    return {_PLUGINS_VARIABLE: f"{allowed},{_PLUGIN}"}


def _make_ring_folder(parent: Path) -> Path:
    folder = parent.absolute() / f".rings-{secrets.token_hex(6)}"
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"cannot write into {parent}", f"{error.strerror}", "choose another folder with --out"
        ) from error
    return folder


def _about(command: Sequence[str], tier: str) -> dict[str, Any]:
    return {"command": kept_command(shlex.join(["python", *command[1:]])), "tier": tier}


def _file_name(server_arguments: Sequence[str]) -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{_model_name(server_arguments)}.safetensors"


def _model_name(server_arguments: Sequence[str]) -> str:
    """The model's name as far as the arguments say it, fit for a file name."""
    names: dict[str, str] = {}
    for position, argument in enumerate(server_arguments):
        flag, equals, value = argument.partition("=")
        following = "".join(server_arguments[position + 1 : position + 2])
        names[flag] = value if equals else following
    for flag in ("--served-model-name", "--model-path", "--model"):
        text = names.get(flag, "")
        # The cache of Hugging Face keeps a model under .../models--org--name/snapshots/<hash>.
        cached = re.search(r"models--[^/]*?--([^/]+)/snapshots/", text)
        last = cached[1] if cached else text.rstrip("/").rpartition("/")[2]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", redact_text(last)).strip("-.")[:60]
        if name:
            return name
    return "server"
