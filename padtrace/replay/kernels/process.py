"""The kernel process: `python -m padtrace.replay.kernels.process KIND VERSION`.

It sees the GPU, which the replay worker hides from SGLang, and what a kernel does to a process (an
abort, `exit(1)` after a failed assertion, a lost CUDA context) happens to this one alone. KIND is
`cuda` or `reference`, VERSION the SGLang release whose kernels are wanted; launches come as frames
on stdin, answers go to stdout.
"""

from __future__ import annotations

import sys
from typing import BinaryIO

import msgspec

from padtrace.errors import EXIT_USAGE, PadtraceError, UsageError
from padtrace.replay import protocol
from padtrace.replay.kernels.cuda_state import context_lost
from padtrace.replay.kernels.interface import FlashMlaKernel
from padtrace.replay.kernels.launch import run_launch
from padtrace.replay.kernels.messages import MAX_FRAME_BYTES, Available, Judged, Launch
from padtrace.replay.kernels.select import select

_REQUESTS: tuple[type[Launch | protocol.Stop], ...] = (Launch, protocol.Stop)


def main(arguments: list[str]) -> int:
    """Serve launches until `Stop` or the end of stdin; returns the exit code."""
    incoming, outgoing = protocol.take_streams()
    try:
        kernel = _kernel(arguments)
    except PadtraceError as error:
        protocol.send(outgoing, protocol.Failed.of(error))
        return error.exit_code
    return serve(kernel, incoming, outgoing)


def serve(kernel: FlashMlaKernel, incoming: BinaryIO, outgoing: BinaryIO) -> int:
    """Answer launches with `kernel` until `Stop` or the end; returns the exit code."""
    found = kernel.availability().reason
    protocol.send(outgoing, Available(name=kernel.name, reason=found))
    while True:
        try:
            asked = protocol.receive(incoming, *_REQUESTS, limit=MAX_FRAME_BYTES)
        except EOFError:
            return 0
        except msgspec.MsgspecError as error:
            refused = UsageError("the kernel process was sent no launch", str(error))
            protocol.send(outgoing, protocol.Failed.of(refused))
            return EXIT_USAGE
        if isinstance(asked, protocol.Stop):
            return 0
        answer = _judge(kernel, asked)
        protocol.send(outgoing, answer)
        if isinstance(answer, Judged) and answer.last:
            return 0


def _kernel(arguments: list[str]) -> FlashMlaKernel:
    kind, version = arguments if len(arguments) == 2 else ("", "")
    kernel = select(kind, sglang_version=version) if kind in ("cuda", "reference") else None
    if kernel is None:
        raise UsageError(
            "the kernel process was started with " + (" ".join(arguments) or "no arguments"),
            "it takes cuda or reference, and the version of an SGLang release",
            "use padtrace replay --kernels ..., which starts it",
        )
    return kernel


def _judge(kernel: FlashMlaKernel, asked: Launch) -> Judged | protocol.Failed:
    try:
        result = run_launch(kernel, asked.shapes, asked.seed, limits=asked.limits)
    except PadtraceError as error:
        return protocol.Failed.of(error)
    return Judged.of(result, last=context_lost())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
