"""What the outside and the worker process say to each other, and how it is framed.

A frame is eight bytes of length, little endian, and one MessagePack object. Recordings travel as
the bytes of their safetensors file. Nothing is pickled; a frame from either side is checked against
the types here.
"""

from __future__ import annotations

from typing import BinaryIO, TypeVar, Union

import msgspec

MAX_FRAME_BYTES = 1 << 32


class Start(msgspec.Struct, tag="start", kw_only=True):
    """First request: which SGLang to import.

    Attributes:
        name: what to call the release in messages and in the replay's `about`.
        root: folder that holds the package `sglang`; None for the interpreter's own.
    """

    name: str
    root: str | None = None


class ReplayRequest(msgspec.Struct, tag="replay", kw_only=True):
    """Replay one recording.

    Attributes:
        recording: the bytes of its file.
        kernels: "off", "auto", "reference" or "cuda".
        chains: whether lengths carry the arithmetic that made them.
    """

    recording: bytes
    kernels: str = "off"
    chains: bool = True


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


Request = Start | ReplayRequest | Stop
Response = Ready | Progress | Done | Failed
REQUESTS: tuple[type[ReplayRequest | Stop], ...] = (ReplayRequest, Stop)
RESPONSES: tuple[type[Response], ...] = (Ready, Progress, Done, Failed)

_Message = TypeVar("_Message")


def send(stream: BinaryIO, message: Request | Response) -> None:
    """Write one frame and flush it."""
    payload = msgspec.msgpack.encode(message)
    stream.write(len(payload).to_bytes(8, "little") + payload)
    stream.flush()


def receive(stream: BinaryIO, *kinds: type[_Message]) -> _Message:
    """Read one frame that holds a message of one of `kinds`.

    Raises:
        EOFError: the other side closed the stream.
        msgspec.MsgspecError: what came is no such message.
    """
    length = int.from_bytes(_exactly(stream, 8), "little")
    if length > MAX_FRAME_BYTES:
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
