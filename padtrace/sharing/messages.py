"""What a string of a recording's tables can be: a name, a line of code, an error's message.

Some of SGLang's messages print a whole batch. A message is kept only if it fits one of the shipped
templates, which let through numbers and fixed words; of any other only a hash is kept, so that two
recordings can still be compared.
"""

from __future__ import annotations

import re

from padtrace.recording.absent import NOT_RECORDED
from padtrace.sharing.redact import REDACTED, redact_text

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

LONGEST_STRING = 512
_HASHED = re.compile(r"blake2b:(?:[0-9a-f]{32}|unprintable)")
_NAME_OF_CODE = re.compile(r"[A-Za-z_<][\w.:<>+-]{0,199}")
_FRAME = re.compile(r"(?:[\w.+<>-]{1,100}/){0,40}[\w.+<>-]{1,100}:\d{1,9} [\w.<>]{1,200}")
# What the recorder itself writes where there is no name.
_OWN = frozenset(
    (
        "",
        "<string table full>",
        "<string lost>",
        "not there once imported",
        REDACTED,
        NOT_RECORDED,
    )
)
_OWN_SENTENCE = re.compile(r"[A-Za-z_]\w{0,80} in the probe")


def fits_template(message: str) -> bool:
    """Whether an error's message is one of the shipped templates, and holds no secret."""
    if not any(template.fullmatch(message) for template in TEMPLATES):
        return False
    return redact_text(message) == message


def kept_string(text: str) -> str:
    """A string of a table if it is what a table holds, otherwise "[redacted]"."""
    if text in _OWN or _HASHED.fullmatch(text):
        return text
    if len(text) > LONGEST_STRING:
        return REDACTED
    known = _NAME_OF_CODE.fullmatch(text) or _FRAME.fullmatch(text) or _OWN_SENTENCE.fullmatch(text)
    if known:
        return text if redact_text(text) == text else REDACTED
    return text if fits_template(text) else REDACTED


def kind_of_string(text: str) -> str:
    """What it is, for a reader: the first of a name, a line of code, a message, something else."""
    if text in _OWN or _OWN_SENTENCE.fullmatch(text):
        return "words of the recorder"
    if _HASHED.fullmatch(text):
        return "hashes of messages"
    if _NAME_OF_CODE.fullmatch(text):
        return "names of code"
    if _FRAME.fullmatch(text):
        return "lines of code"
    return "messages of a template" if fits_template(text) else "other texts"
