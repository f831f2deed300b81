"""`padtrace record`: start SGLang's server with the recorder on, seal when it ends.

The server is the same `python -m sglang.launch_server` as without padtrace, in the same folder,
with some environment variables more; what is recorded lies in its rings, so it does not matter how
it ends. Its output goes to a log that it writes itself and that is followed here, so it does not
matter to the server how this process ends.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padtrace import children
from padtrace.children import Log, python_command, python_environment
from padtrace.errors import EnvironmentMissingError, PadtraceError, UsageError
from padtrace.record import settings
from padtrace.record.ring_search import remove_folder
from padtrace.record.seal import Sealed, seal
from padtrace.record.server_process import ServerProcess
from padtrace.record.status import Status, StatusReader
from padtrace.recording import writer
from padtrace.sharing.redact import redact_text
from padtrace.sharing.rule import kept_command

_MODULE = "sglang.launch_server"
LOG_NAME = "server.log"
_PLUGIN = "padtrace"
_PROBE_SECONDS = 60.0
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
        log: what the server wrote, where it was kept: beside rings that were.
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
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class StopAfter:
    """When to end the server: after so many forwards of the fastest rank, or so many seconds."""

    forwards: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the caller wants to hear; all from the main thread except `line`.

    `started` gets the folder of the rings and the server's log, which outlive a SIGKILL of this
    process; without `line` the server writes to where this process writes, and there is no log.
    """

    line: Callable[[str], None] | None = None
    status: Callable[[Status], None] | None = None
    first_error: Callable[[FirstError], None] | None = None
    started: Callable[[Path, Path | None], None] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """How an interpreter is started: its command, its variables, its folder (None: private)."""

    python: list[str]
    environment: dict[str, str]
    folder: Path | None


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
    private: bool = False,
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
        private: the server is padtrace's own and not the user's: it runs in a private folder and
            imports nothing from where it runs. The user's own keeps the folder, the paths among its
            arguments and the module path that it has without padtrace.

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
    place = _place(python, {**base, **variables}, private)
    _check_interpreter(place)
    about = _about([python, "-m", _MODULE, *server_arguments], tier)
    job = _Job(_make_folders(out, rings), run, out / _file_name(server_arguments), about)
    place.environment[settings.FOLDER] = str(job.folder)
    log = None if callbacks.line is None else Log(job.log, callbacks.line)
    try:
        command = [*place.python, "-m", _MODULE, *server_arguments]
        server = ServerProcess(command, place.environment, log, place.folder)
    except PadtraceError:
        job.remove_folders()
        raise
    if callbacks.started is not None:
        callbacks.started(job.folder, None if log is None else log.path)
    with server.forwarding_signals():
        code = _watch(server, job, callbacks, stop_after, until_error, poll_seconds)
        server.finish()
    return job.result(code)


class _Job:
    """The rings of one run on their way to one file."""

    def __init__(
        self, folders: tuple[Path, Path], run: str, target: Path, about: dict[str, Any]
    ) -> None:
        self.folder, log_folder = folders
        self.log = log_folder / LOG_NAME
        self.run, self.target, self.about = run, target, about
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
            self.remove_folders()
            rings = None
        following = f"padtrace diff {shlex.quote(str(self.target))}"
        return RecordResult(
            code,
            self.target,
            size,
            sealed,
            None,
            rings,
            following,
            self.first_error,
            self.log if rings is not None and self.log.exists() else None,
        )

    def remove_folders(self) -> None:
        """Of the rings and of the log, which was passed on."""
        for folder in {self.folder, self.log.parent}:
            remove_folder(folder)

    def _unsealed(self, code: int, problem: PadtraceError) -> RecordResult:
        if not {*self.folder.iterdir()} - {self.log}:
            self.remove_folders()
        early = self.first_error.recording if self.first_error is not None else None
        if not self.folder.exists():
            return RecordResult(code, None, 0, None, problem, None, "padtrace doctor")
        following = (
            f"padtrace seal {shlex.quote(str(self.folder))} -o {shlex.quote(str(self.target))}"
        )
        log = self.log if self.log.exists() else None
        return RecordResult(
            code, early, 0, None, problem, self.folder, following, self.first_error, log
        )


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


def _place(python: str, environment: dict[str, str], private: bool) -> _Place:
    """Where the server runs, and what looks whether it can: both see the same modules."""
    if not private:
        return _Place([python], environment, Path("."))
    # What the lab put on the path is all of it.
    path = [Path(part) for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    return _Place(python_command(python), python_environment(environment, *path), None)


def _check_interpreter(place: _Place) -> None:
    python = place.python[0]
    words = ""
    try:
        _, output, words = children.answer(
            [*place.python, "-c", _PROBE],
            _PROBE_SECONDS,
            environment=place.environment,
            folder=place.folder,
        )
        found = json.loads(output)
    except (PadtraceError, ValueError) as error:
        why = error.why if isinstance(error, PadtraceError) else words
        raise EnvironmentMissingError(
            f"cannot use the interpreter {python}", why, "choose another with --python"
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


def _make_folders(out: Path, rings: Path | None) -> tuple[Path, Path]:
    """The folder of the rings and that of the log: one, unless the rings are kept elsewhere.

    A log grows, so it does not go into the memory that rings may be kept in.
    """
    name = f".rings-{secrets.token_hex(6)}"
    made: list[Path] = []
    for parent in dict.fromkeys((out.absolute(), (rings or out).absolute())):
        try:
            (parent / name).mkdir(parents=True, mode=0o700)
        except OSError as error:
            for folder in made:
                folder.rmdir()
            raise UsageError(
                f"cannot write into {parent}", f"{error.strerror}", "choose another folder"
            ) from error
        made.append(parent / name)
    return made[-1], made[0]


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
