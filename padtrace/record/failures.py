"""Exceptions that leave hooked functions: one error event each, where it was first seen.

What of an exception's message is kept is said in `sharing.messages`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import TracebackType

from padtrace.record.state import ERROR, BatchRecord, State
from padtrace.sharing.messages import fits_template, kept_string

_MARK = "_padtrace_seen"
MAX_FRAMES = 12
_OURS = ("padtrace/record/", "sglang/srt/plugins/hook_registry.py")

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
    if fits_template(candidate):
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
    return [kept_string(frame) for frame in found[-MAX_FRAMES:]]


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
            state.string(kept_string(type(error).__name__)),
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
