"""Exceptions in a recording: which text may stay, and which becomes a hash."""

from __future__ import annotations

import hashlib

import pytest

from padtrace.record.failures import MAX_FRAMES, frames_of, message_of, package_path


@pytest.mark.parametrize(
    "text",
    [
        "num_splits must have shape (b+1)",
        "indices must have shape (b, s_q, topk)",
        "topk_indices rows (8) > num_tokens (6); this indicates a mismatch between indexer output "
        "and q layout.",
        "size 40 exceeds max captured bucket 32; can_run_graph should have rejected this batch",
        "The size of tensor a (8) must match the size of tensor b (7) at non-singleton dimension 0",
        "Sizes of tensors must match except in dimension 1. Expected size 4 but got size 8 for "
        "tensor number 1 in the list.",
        "shape '[4, 1, 16]' is invalid for input of size 128",
        "Trying to create tensor with negative dimension -2: [-2]",
    ],
)
def test_known_messages_are_kept(text: str) -> None:
    assert message_of(RuntimeError(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "prompt was: my secret plan",
        "num_splits must have shape (b+1)\nForwardBatch(input_ids=[1, 2, 3])",
        "shape '[4, my secret]' is invalid for input of size 128",
        "index 3 is out of bounds for dimension 0 with size 2; request 'rid-1'",
    ],
)
def test_anything_else_is_a_hash_of_its_text(text: str) -> None:
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    assert message_of(RuntimeError(text)) == f"blake2b:{digest}"


def test_of_cuda_errors_only_the_first_line_is_kept() -> None:
    text = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."
    assert message_of(RuntimeError(text)) == "CUDA error: an illegal memory access was encountered"
    memory = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
    assert message_of(RuntimeError(memory)) == "CUDA out of memory."


def test_no_message_and_no_printable_message() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert message_of(AssertionError()) == ""
    assert message_of(Unprintable()) == "blake2b:unprintable"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/srv/env/lib/python3.11/site-packages/sglang/srt/a.py", "sglang/srt/a.py"),
        ("/home/me/sglang/python/sglang/srt/managers/b.py", "sglang/srt/managers/b.py"),
        ("/home/me/notes/secret_project.py", "secret_project.py"),
        ("<string>", "<string>"),
    ],
)
def test_paths_are_cut_to_their_package(path: str, expected: str) -> None:
    assert package_path(path) == expected


def test_the_last_frames_outermost_first() -> None:
    def deep(level: int) -> None:
        if level:
            deep(level - 1)
        raise ValueError

    with pytest.raises(ValueError, match=r"^$") as caught:
        deep(20)
    frames = frames_of(caught.value.__traceback__)
    assert len(frames) == MAX_FRAMES
    assert all(frame.endswith(" deep") for frame in frames)
    assert frames[0].startswith("test_failures.py:")
