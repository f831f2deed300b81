"""Why a forward is not driven."""

from __future__ import annotations


class NotDrivenError(Exception):
    """SGLang's own path of this forward cannot be taken here.

    Attributes:
        reason: in a few words; equal reasons are counted together.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
