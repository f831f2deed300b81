"""What the outside and the worker process say to each other, and how every process frames it.

A frame is eight bytes of length, little endian, and one MessagePack object. Recordings travel as
the bytes of their safetensors file. Nothing is pickled; a frame from either side is checked against
the types here.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO, TypeVar, Union

import msgspec

from padtrace import errors
from padtrace.errors import PadtraceError

MAX_FRAME_BYTES = 1 << 32


class Start(msgspec.Struct, tag="start", kw_only=True):
    """First request: which SGLang to import.

    Attributes:
        name: what to call the release in messages and in the replay's `about`.
        root: folder that holds the package `sglang`; None for the interpreter's own.
        device: what SGLang is shown, see `replay.devices`.
    """

    name: str
    root: str | None = None
    device: str = "cpu"


class ReplayRequest(msgspec.Struct, tag="replay", kw_only=True):
    """Replay one recording.

    Attributes:
        recording: the bytes of its file.
        kernels: "off", "auto", "reference" or "cuda".
        chains: whether lengths carry the arithmetic that made them.
        processes: first and end of the recorded processes to replay; None for all.
    """

    recording: bytes
    kernels: str = "off"
    chains: bool = True
    processes: tuple[int, int] | None = None


class Stop(msgspec.Struct, tag="stop"):
    """Last request."""


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """SGLang is imported.

    Attributes:
        version: what the package says of itself.
        root: where it was imported from.
        capabilities: name of each capability to what serves it, or None where it is missing.
    """

    version: str
    root: str
    capabilities: dict[str, str | None]


class Progress(msgspec.Struct, tag="progress", kw_only=True):
    """How far a replay is, in batches; `text` says what goes on before the first."""

    done: int
    total: int
    text: str = ""


class Done(msgspec.Struct, tag="done", kw_only=True):
    """The replayed recording, as the bytes of its file."""

    recording: bytes


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    """A `PadtraceError` by the name of its class, and its three lines."""

    error: str
    what: str
    why: str
    hint: str

    @classmethod
    def of(cls, error: PadtraceError) -> Failed:
        """The message that tells of `error`."""
        kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return cls(error=next(kinds).__name__, what=error.what, why=error.why, hint=error.hint)

    def as_error(self) -> PadtraceError:
        """The error that the message tells of."""
        kind = getattr(errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, PadtraceError)):
            kind = PadtraceError
        return kind(self.what, self.why, self.hint)


Request = Start | ReplayRequest | Stop
Response = Ready | Progress | Done | Failed
REQUESTS: tuple[type[ReplayRequest | Stop], ...] = (ReplayRequest, Stop)
RESPONSES: tuple[type[Response], ...] = (Ready, Progress, Done, Failed)

_Message = TypeVar("_Message")


def take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout for frames; what libraries print to stdout goes to stderr from now on."""
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, outgoing


def send(stream: BinaryIO, message: msgspec.Struct) -> None:
    """Write one frame and flush it."""
    payload = msgspec.msgpack.encode(message)
    stream.write(len(payload).to_bytes(8, "little") + payload)
    stream.flush()


def receive(stream: BinaryIO, *kinds: type[_Message], limit: int = MAX_FRAME_BYTES) -> _Message:
    """Read one frame of at most `limit` bytes that holds a message of one of `kinds`.

    Raises:
        EOFError: the other side closed the stream.
        msgspec.MsgspecError: what came is no such message.
    """
    length = int.from_bytes(_exactly(stream, 8), "little")
    if length > limit:
        raise msgspec.DecodeError(f"a frame claims {length} bytes")
    payload = _exactly(stream, length)
    message: _Message = msgspec.msgpack.decode(payload, type=Union[kinds])  # noqa: UP007
    return message


def _exactly(stream: BinaryIO, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = stream.read(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
