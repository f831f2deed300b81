"""Exceptions that leave hooked functions: one error event each, where it was first seen.

Some of SGLang's messages print a whole batch. A message is kept only if it fits one of the shipped
templates, which let through numbers and fixed words; of any other only a hash is kept, so that two
recordings can still be compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from types import TracebackType

from padtrace.record.state import ERROR, BatchRecord, State

_MARK = "_padtrace_seen"
MAX_FRAMES = 12
_OURS = ("padtrace/record/", "sglang/srt/plugins/hook_registry.py")

_N = r"[-\d]+"
_NAME = r"[A-Za-z_][\w.]{0,80}"
_SHAPE = r"\[[\d, -]*\]"
TEMPLATES = tuple(
    re.compile(pattern)
    for pattern in (
        # FlashMLA's shape checks, such as "num_splits must have shape (b+1)"
        rf"{_NAME} must have shape \([\w +*/,.-]{{1,80}}\)",
        rf"{_NAME} must be (?:contiguous|on CUDA|a CUDA tensor|(?:at least )?\d+-?D?)",
        # SGLang: planned against padded rows, buckets
        rf"topk_indices rows \({_N}\) > num_tokens \({_N}\); "
        r"this indicates a mismatch between indexer output and q layout\.",
        rf"size {_N} exceeds max captured bucket {_N}; "
        r"can_run_graph should have rejected this batch",
        r"DP CUDA graph replay requires raw per-rank request counts",
        r"All of them must not be None",
        r"only page size 64 is supported",
        r"extend-idle conversion expects an empty rank",
        # torch: shapes that do not fit
        rf"The size of tensor a \({_N}\) must match the size of tensor b \({_N}\) "
        rf"at non-singleton dimension {_N}",
        rf"The expanded size of the tensor \({_N}\) must match the existing size \({_N}\) "
        rf"at non-singleton dimension {_N}\.\s+Target sizes: {_SHAPE}\.\s+Tensor sizes: {_SHAPE}",
        rf"Sizes of tensors must match except in dimension {_N}\. Expected size {_N} but got "
        rf"size {_N} for tensor number {_N} in the list\.?",
        rf"shape '{_SHAPE}' is invalid for input of size {_N}",
        rf"Trying to create tensor with negative dimension {_N}(?:: {_SHAPE})?",
        rf"mat1 and mat2 shapes cannot be multiplied \({_N}x{_N} and {_N}x{_N}\)",
        rf"index {_N} is out of bounds for dimension {_N} with size {_N}",
        rf"start \({_N}\) \+ length \({_N}\) exceeds dimension size \({_N}\)\.?",
        r"max\(\): Expected reduction dim to be specified for input\.numel\(\) == 0\. "
        r"Specify the reduction dim with the 'dim' argument\.",
        # CUDA's own words; what follows them on further lines is dropped
        r"CUDA error: [a-z ,]{1,120}",
        r"CUDA out of memory\.",
    )
)
_FIRST_LINE_ONLY = ("CUDA error: ",)


def message_of(error: BaseException) -> str:
    """The text if it fits a template, "" if there is none, otherwise `blake2b:<hash>`."""
    try:
        text = str(error)
    except Exception:
        return "blake2b:unprintable"
    if not text:
        return ""
    candidate = text.strip()
    if candidate.startswith(_FIRST_LINE_ONLY):
        candidate = candidate.splitlines()[0].strip()
    elif candidate.startswith("CUDA out of memory."):
        candidate = "CUDA out of memory."
    if any(template.fullmatch(candidate) for template in TEMPLATES):
        return candidate
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
    return f"blake2b:{digest}"


def frames_of(traceback: TracebackType | None) -> list[str]:
    """`file:line function` of the last frames, outermost first; hooks themselves left out."""
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        path = package_path(code.co_filename)
        if not path.startswith(_OURS):
            found.append(f"{path}:{traceback.tb_lineno} {code.co_name}")
        traceback = traceback.tb_next
    return found[-MAX_FRAMES:]


def package_path(path: str) -> str:
    """The part of a path that says which package it is in, without the machine's own folders."""
    path = path.replace("\\", "/")
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2]
    for package in ("sglang", "padtrace", "sgl_kernel", "flash_mla", "torch"):
        _, found, rest = path.rpartition(f"/{package}/")
        if found:
            return f"{package}/{rest}"
    return path.rpartition("/")[2]


class ErrorRecorder:
    """Writes the error event of an exception once, however many hooked functions it leaves."""

    def __init__(self, state: State, tell: Callable[[str, BatchRecord], None] | None) -> None:
        """
        Args:
            tell: the alarm; told the function and the batch.
        """
        self._state = state
        self._tell = tell
        self._last: int | None = None

    def __call__(self, error: BaseException, function: str, record: BatchRecord) -> None:
        if self._seen(error) or isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            return
        state = self._state
        frames = [state.string(frame) for frame in frames_of(error.__traceback__)]
        frame = state.enter(function, record)
        exit_seq = state.leave(frame)
        own = (
            state.string(function),
            state.string(type(error).__name__),
            state.string(message_of(error)),
            len(frames),
        )
        state.event(ERROR, frame, exit_seq, own, frames)
        if self._tell is not None:
            self._tell(function, record)

    def _seen(self, error: BaseException) -> bool:
        if getattr(error, _MARK, False) or self._last == id(error):
            return True
        try:
            setattr(error, _MARK, True)
        except (AttributeError, TypeError):
            # No attributes on this exception: its id serves, for as long as it is the last.
            self._last = id(error)
        return False
