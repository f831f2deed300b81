"""Strict stand-ins: plain objects that hold what was recorded and refuse everything else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from padtrace.errors import EnvironmentMissingError


class NotHeldError(EnvironmentMissingError):
    """SGLang read something that the recording does not hold (exit code 4)."""


class StandIn:
    """An object with the given attributes and no others.

    Reading any other attribute is a `NotHeldError` that names SGLang's line: an `AttributeError`
    would be swallowed by `getattr(x, name, default)`, and the default would be a silent guess.

    Args:
        kind: what SGLang calls the object.
        values: its attributes.
        absent: names that SGLang probes for and that a normal server's object lacks too.
    """

    def __init__(self, kind: str, values: dict[str, Any], absent: Iterable[str] = ()) -> None:
        self.__dict__.update(values)
        self.__dict__["_stand_in"] = (kind, frozenset(absent))

    def __getattr__(self, name: str) -> Any:
        kind, absent = self.__dict__["_stand_in"]
        if name in absent or name.startswith("__"):
            raise AttributeError(name)
        raise not_held(f"{kind}.{name}")


class Unobserved:
    """The value of a field that nobody observed; touching it is a `NotHeldError`."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        # To padtrace's own probes it is what they cannot observe.
        if sys._getframe(1).f_globals.get("__name__", "").startswith("padtrace.record"):
            raise AttributeError(name)
        raise not_held(self.__dict__["_name"])

    def _touched(self, *_: Any) -> Any:
        raise not_held(self.__dict__["_name"])

    __bool__ = __len__ = __iter__ = __getitem__ = __index__ = __int__ = _touched
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = _touched
    __lt__ = __le__ = __gt__ = __ge__ = _touched


def not_held(name: str) -> NotHeldError:
    """The error for `name`, with the line of SGLang that read it."""
    return NotHeldError(
        f"SGLang reads {name}, which the recording does not hold",
        f"it is read at {sglang_line()}",
        "record with the newest padtrace, or report this line as a missing field",
    )


def sglang_line() -> str:
    """`file:line in function` of the innermost SGLang frame on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "/sglang/" in path:
            short = "sglang/" + path.rsplit("/sglang/", 1)[1]
            return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"
