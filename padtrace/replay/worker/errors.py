"""An exception of SGLang's as the columns of an error event."""

from __future__ import annotations

import traceback

from padtrace.recording.model import Value

_KEPT_FRAMES = 8


def error_values(function: str, error: BaseException) -> dict[str, Value]:
    """The columns of an error event: SGLang's own words, since a replay holds no user's data."""
    frames = [
        f"sglang/{frame.filename.replace(chr(92), '/').rsplit('/sglang/', 1)[1]}:{frame.lineno}"
        f" {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/sglang/" in frame.filename.replace(chr(92), "/")
    ]
    text = (str(error).splitlines() or [""])[0]
    return {
        "function": function,
        "type": type(error).__name__,
        "message": text[:500],
        "frames": frames[-_KEPT_FRAMES:],
    }
