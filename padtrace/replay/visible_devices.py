"""Which GPUs the command saw, handed through the worker to the kernel process.

The worker hides every GPU from SGLang, so that its CPU paths run; the real kernels need them.
"""

from __future__ import annotations

from collections.abc import MutableMapping

CUDA = "CUDA_VISIBLE_DEVICES"
HANDED_ON = "PADTRACE_OUTER_CUDA_VISIBLE_DEVICES"


def hand_on(variables: MutableMapping[str, str]) -> None:
    """Keep what the command had under a name that the worker leaves alone."""
    variables.pop(HANDED_ON, None)
    if CUDA in variables:
        variables[HANDED_ON] = variables[CUDA]


def restore(variables: MutableMapping[str, str]) -> None:
    """Put back what the command had; nothing handed on means that it had no such variable."""
    handed_on = variables.pop(HANDED_ON, None)
    variables.pop(CUDA, None)
    if handed_on is not None:
        variables[CUDA] = handed_on
