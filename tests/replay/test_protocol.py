"""Frames between the outside and the worker."""

from __future__ import annotations

import io

import msgspec
import pytest

from padtrace.replay import protocol


def test_messages_come_back_in_order() -> None:
    stream = io.BytesIO()
    sent = [
        protocol.Progress(done=1, total=2, text="importing"),
        protocol.Failed(error="UsageError", what="a", why="b", hint="c"),
        protocol.Done(recording=b"\x00" * 1000),
    ]
    for message in sent:
        protocol.send(stream, message)
    stream.seek(0)
    assert [protocol.receive(stream, *protocol.RESPONSES) for _ in sent] == sent
    with pytest.raises(EOFError):
        protocol.receive(stream, *protocol.RESPONSES)


def test_a_message_of_the_other_side_is_refused() -> None:
    stream = io.BytesIO()
    protocol.send(stream, protocol.Stop())
    stream.seek(0)
    with pytest.raises(msgspec.ValidationError):
        protocol.receive(stream, *protocol.RESPONSES)


@pytest.mark.parametrize("cut", [1, 7, 9, 20])
def test_a_frame_that_ends_early_is_the_end(cut: int) -> None:
    stream = io.BytesIO()
    protocol.send(stream, protocol.Progress(done=1, total=2, text="importing SGLang"))
    with pytest.raises(EOFError):
        protocol.receive(io.BytesIO(stream.getvalue()[:cut]), *protocol.RESPONSES)


def test_a_frame_cannot_claim_more_than_the_limit() -> None:
    claim = (protocol.MAX_FRAME_BYTES + 1).to_bytes(8, "little")
    with pytest.raises(msgspec.DecodeError):
        protocol.receive(io.BytesIO(claim + b"x"), *protocol.RESPONSES)


def test_what_looks_like_a_pickle_is_no_message() -> None:
    payload = b"cposix\nsystem\n(S'true'\ntR."
    framed = len(payload).to_bytes(8, "little") + payload
    with pytest.raises(msgspec.MsgspecError):
        protocol.receive(io.BytesIO(framed), *protocol.RESPONSES)
