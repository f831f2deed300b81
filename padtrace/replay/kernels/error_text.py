"""The words of a kernel's refusal, freed from what differs between two builds of one kernel.

The same C++ check speaks differently by build: torch may append a C++ backtrace, the stable ABI
puts function, file and line in front (``STD_TORCH_CHECK``, torch/headeronly/util/Exception.h), and
FlashMLA's own ``KU_ASSERT`` puts file and line in front (``kerutils/host/host.h``).
"""

from __future__ import annotations

import re

_BACKTRACE = re.compile(
    r"\n(Exception raised from |CUDA kernel errors might|C\+\+ CapturedTraceback).*", re.S
)
_STABLE_ABI = re.compile(r"^[\w()<>:~ ]+, [^\n,]*\.(?:cpp|cu|h|cuh|hpp):\d+, ")
_KU_ASSERT = re.compile(r"^Assertion error \([^)]*:\d+\): ")


def own_words(error: BaseException | str) -> str:
    """The check's own sentence, without place, backtrace or surrounding blanks."""
    text = error if isinstance(error, str) else str(error)
    text = _BACKTRACE.sub("", text)
    text = _STABLE_ABI.sub("", text)
    return _KU_ASSERT.sub("", text).strip()
