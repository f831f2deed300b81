"""Names that SGLang's modules copied from one another by `from ... import`."""

from __future__ import annotations

import sys
from typing import Any


def replace_copies(name: str, before: Any, after: Any) -> None:
    """Give every module of SGLang that holds `before` under this name the other object."""
    for module in list(sys.modules.values()):
        ours = getattr(module, "__name__", "").startswith("sglang")
        if ours and vars(module).get(name) is before:
            setattr(module, name, after)
