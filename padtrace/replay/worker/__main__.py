"""The worker process: `python -m padtrace.replay.worker`, spoken to over stdin and stdout."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from typing import Any, BinaryIO

from padtrace.errors import EnvironmentMissingError, PadtraceError
from padtrace.replay import protocol

_WITHOUT_SGLANG = "run it with the interpreter that has SGLang, or name a release: --sglang 0.5.18"
_INCOMPLETE = "padtrace's own base environment has everything: unset PADTRACE_REPLAY_PYTHON"


def main() -> int:
    """Serve requests until `Stop` or the end of stdin; returns the exit code."""
    incoming, outgoing = protocol.take_streams()
    # Its folder is private and goes with it; what it makes and starts shall go there as well.
    tempfile.tempdir = os.getcwd()
    try:
        start = protocol.receive(incoming, protocol.Start)
        release = _import(start, outgoing)
    except PadtraceError as error:
        _fail(outgoing, error)
        return error.exit_code
    except EOFError:
        return 0
    while True:
        try:
            request = protocol.receive(incoming, *protocol.REQUESTS)
        except EOFError:
            return 0
        if isinstance(request, protocol.Stop):
            return 0
        _serve(release, request, outgoing)


def _import(start: protocol.Start, outgoing: BinaryIO) -> Any:
    from padtrace.replay.worker.obstacles import (
        prepare_environment,
        prepare_modules,
        prepare_torch,
    )

    protocol.send(outgoing, protocol.Progress(done=0, total=0, text=f"importing {start.name}"))
    if start.root is not None:
        sys.path.insert(0, start.root)
    # The recorder's probes write to memory here; their compiled halves write to a ring alone.
    os.environ["PADTRACE_NATIVE"] = "0"
    prepare_environment(start.device)
    try:
        prepare_torch(start.device)
        from padtrace.replay.worker.capabilities import import_release
        from padtrace.replay.worker.leaves import stand_in_for_packages

        stand_in_for_packages()
        prepare_modules()
        version = import_release()
    except ImportError as error:
        named = "SGLang of this interpreter" if start.root is None else f"SGLang {start.name}"
        raise EnvironmentMissingError(
            f"{named} cannot be imported",
            f"{type(error).__name__}: {error}",
            _WITHOUT_SGLANG if start.root is None else _INCOMPLETE,
        ) from error
    from padtrace.replay.worker.replayer import Release

    release = Release(start.name, version, start.device)
    # SGLang's modules are a million objects that never go; looking through them takes seconds.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)
    import sglang

    root = os.path.dirname(os.path.dirname(sglang.__file__ or ""))
    table = release.capabilities.table()
    protocol.send(outgoing, protocol.Ready(version=version, root=root, capabilities=table))
    return release


def _serve(release: Any, request: protocol.ReplayRequest, outgoing: BinaryIO) -> None:
    from padtrace.recording.reader import from_bytes
    from padtrace.recording.writer import to_bytes
    from padtrace.replay.worker.replayer import Replayer

    last = [0.0]

    def progress(done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - last[0] > 0.1:
            last[0] = now
            protocol.send(outgoing, protocol.Progress(done=done, total=total))

    release.provenance.enabled = request.chains
    try:
        recording = from_bytes(request.recording, "the recording sent to the worker")
        processes = range(*(request.processes or (0, recording.rows("process"))))
        replayed = Replayer(release, recording, progress, request.kernels).replay(processes)
        protocol.send(outgoing, protocol.Done(recording=to_bytes(replayed)))
    except PadtraceError as error:
        _fail(outgoing, error)


def _fail(outgoing: BinaryIO, error: PadtraceError) -> None:
    protocol.send(outgoing, protocol.Failed.of(error))


if __name__ == "__main__":
    sys.exit(main())
