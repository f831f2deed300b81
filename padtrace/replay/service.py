"""The outside of a replay: picks the SGLang, starts the worker, hands recordings over."""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import padtrace
from padtrace.children import Child, Pipes, python_command, python_environment
from padtrace.errors import EnvironmentMissingError
from padtrace.recording import about
from padtrace.recording.model import Recording
from padtrace.recording.reader import from_bytes
from padtrace.recording.writer import content_digest, to_bytes
from padtrace.replay import (
    checkouts,
    devices,
    environments,
    fingerprints,
    protocol,
    releases,
    shares,
    visible_devices,
)

Progress = Callable[[int, int, str], None]

_WORKER = "padtrace.replay.worker"
_END_SECONDS = 5.0
_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Doctor:
    """What an SGLang offers: its version, where it lies, and what serves each capability."""

    version: str
    root: str
    capabilities: dict[str, str | None]


class Worker:
    """One worker process with one SGLang imported; serves any number of recordings.

    Raises:
        EnvironmentMissingError: on construction, where SGLang cannot be imported.
    """

    def __init__(
        self,
        release: releases.Release,
        python: Path,
        progress: Progress,
        device: str = devices.CPU,
    ) -> None:
        self.release = release
        self._child = Child(
            python_command(python, "-u", "-m", _WORKER),
            environment=_environment(),
            streams=Pipes(),
        )
        root = None if release.root is None else str(release.root)
        self._send(protocol.Start(name=release.name, root=root, device=device))
        ready = self._receive(protocol.Ready, progress)
        self.doctor = Doctor(ready.version, ready.root, ready.capabilities)

    def replay(
        self,
        data: bytes,
        *,
        kernels: str,
        chains: bool,
        progress: Progress,
        processes: tuple[int, int] | None = None,
    ) -> Recording:
        """Replay one recording, or some of its processes.

        Args:
            data: the recording as the bytes of its file.
        """
        request = protocol.ReplayRequest(
            recording=data, kernels=kernels, chains=chains, processes=processes
        )
        self._send(request)
        done = self._receive(protocol.Done, progress)
        replayed = from_bytes(done.recording, "the replayed recording")
        replayed.about["of"] = content_digest(data)
        return replayed

    @property
    def alive(self) -> bool:
        return self._child.alive

    def close(self) -> None:
        """Ask the worker to end, and make it."""
        with contextlib.suppress(OSError, ValueError, EnvironmentMissingError):
            self._send(protocol.Stop())
        with contextlib.suppress(OSError):
            self._child.incoming.close()
        self._child.end(patience=_END_SECONDS, grace=_GRACE_SECONDS)

    def _send(self, message: protocol.Request) -> None:
        try:
            protocol.send(self._child.incoming, message)
        except OSError:
            raise self._died() from None

    def _receive(self, wanted: type[Any], progress: Progress) -> Any:
        while True:
            try:
                message = protocol.receive(self._child.outgoing, *protocol.RESPONSES)
            except (EOFError, msgspec.MsgspecError, OSError):
                raise self._died() from None
            if isinstance(message, protocol.Progress):
                progress(message.done, message.total, message.text)
            elif isinstance(message, protocol.Failed):
                raise message.as_error()
            elif isinstance(message, wanted):
                return message

    def _died(self) -> EnvironmentMissingError:
        code = self._child.end(patience=_END_SECONDS)
        return EnvironmentMissingError(
            f"the replay worker for SGLang {self.release.name} died (exit code {code})",
            self._child.last_words(),
            "`padtrace doctor --sglang ...` shows what this SGLang offers",
        )


_workers: dict[tuple[releases.Release, Path, int, str], Worker] = {}


def replay(
    recording: Recording,
    *,
    sglang: str | Path | None = None,
    kernels: str = "auto",
    chains: bool = True,
    jobs: int | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Recording:
    """Replay a recording through a real SGLang, in a process of its own.

    The worker stays for further calls with the same SGLang, since an import takes seconds.

    Args:
        sglang: a version, a path, "installed", or None for the release the recording names. It is
            executed; see `releases.resolve` for what a recording can name.
        kernels: "off", "auto", "reference" or "cuda".
        chains: whether lengths carry the arithmetic that made them.
        jobs: how many workers may share the recorded processes; None for as many as pay.
        device: what SGLang is shown, see `devices`; None for what the recording says.
        progress: called with batches done, batches in all (0 before it is known), and a text.

    Raises:
        UsageError: it is not said which SGLang, or the path holds none.
        EnvironmentMissingError: SGLang, a capability of it, or its environment is missing, or
            SGLang reads what the recording does not hold.
    """
    tell = progress or _silent
    recorded = recorded_release(recording)
    shown, assumed = devices.shown_device(recording.facts, device)
    # One GPU has room for one process of kernels.
    parts = shares.shares(recording, 1 if kernels == "cuda" else jobs)
    data = to_bytes(recording)
    if len(parts) == 1:
        worker = worker_for(sglang, recorded, tell, device=shown)
        replayed = worker.replay(data, kernels=kernels, chains=chains, progress=tell)
    else:
        # What is fetched or installed is so once, before the threads ask for it.
        _found(sglang, recorded, tell)

        def one(number: int, part: shares.Share, told: Progress) -> Recording:
            mine = worker_for(sglang, recorded, told, number, shown)
            return mine.replay(data, kernels=kernels, chains=chains, progress=told, processes=part)

        replayed = shares.replay_shares(parts, one, tell, close)
        worker = worker_for(sglang, recorded, tell, device=shown)
    if assumed:
        replayed.about["notes"] = [*replayed.about.get("notes", []), assumed]
    replayed.coverage["driven"]["device"] = {"shown": shown, "assumed": assumed}
    fingerprints.restate(replayed, worker.release.root)
    replayed.about["sglang_source"] = worker.release.source
    if worker.release.source == "checkout" and worker.release.root is not None:
        replayed.about["sglang_name"] = checkouts.name(worker.release.name, worker.release.root)
    return replayed


def doctor(sglang: str | Path | None = None, *, progress: Progress | None = None) -> Doctor:
    """What an SGLang offers of what padtrace needs; None means the interpreter's own."""
    worker = worker_for(sglang or releases.INSTALLED, None, progress or _silent)
    return worker.doctor


def worker_for(
    sglang: str | Path | None,
    recorded: str | None,
    progress: Progress,
    number: int = 0,
    device: str = devices.CPU,
) -> Worker:
    """The living worker of this number for this SGLang and device, started if there is none."""
    release, python = _found(sglang, recorded, progress)
    key = (release, python, number, device)
    worker = _workers.get(key)
    if worker is None or not worker.alive:
        if worker is not None:
            worker.close()
        worker = _workers[key] = Worker(release, python, progress, device)
    return worker


def _found(
    sglang: str | Path | None, recorded: str | None, progress: Progress
) -> tuple[releases.Release, Path]:
    """The release and the interpreter, fetched or made if need be."""

    def say(text: str) -> None:
        progress(0, 0, text)

    return releases.resolve(sglang, recorded, say), environments.replay_interpreter(say)


def close() -> None:
    """End every worker."""
    while _workers:
        _workers.popitem()[1].close()


atexit.register(close)


@contextmanager
def session() -> Iterator[None]:
    """Ends the workers of a piece of work when it ends."""
    try:
        yield
    finally:
        close()


def recorded_release(recording: Recording) -> str | None:
    """The release a recording names, if it does."""
    return about.view(recording.about).sglang


def _environment() -> dict[str, str]:
    """The worker's variables: padtrace on its path, recording off, the GPUs handed on."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PADTRACE_RECORD", "PADTRACE_LAB", "SGLANG_ENABLE_CP_V2")
    }
    visible_devices.hand_on(variables)
    return python_environment(variables, _package_folder())


_own_path: list[tempfile.TemporaryDirectory[str]] = []


def _package_folder() -> Path:
    """A folder that holds the package padtrace, and nothing else that a worker could import.

    Beside an installed padtrace lie the packages of this interpreter, which another must not see;
    beside a checkout lies whatever somebody put there.
    """
    if not _own_path:
        folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(prefix="padtrace-")
        package = Path(padtrace.__file__).resolve().parent
        (Path(folder.name) / "padtrace").symlink_to(package)
        _own_path.append(folder)
    return Path(_own_path[0].name)


def _silent(done: int, total: int, text: str) -> None:
    return None
