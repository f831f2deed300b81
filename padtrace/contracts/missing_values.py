"""PT701 and PT702: a padding or planning function raised (kind T7, and what has no other name)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.evidence import Evidence
from padtrace.contracts.model import BoolArray, Contract, Evaluation, Finding, Severity, Violations

_ABSENT_TYPES = ("AttributeError", "TypeError")
# A kernel's refusal is the outcome of a row contract, told there.
_KERNELS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "fwd_kvcache_mla")
_NUM_SPLITS = "num_splits must have shape"
_HARMS = {
    "prepare_mlp_sync_batch": "padding it",
    "_pad_inputs_to_size": "padding it",
    "post_forward_mlp_sync_batch": "taking the padding back",
    "init_mlp_sync_metadata": "scaling its counts",
}


def absent_values(evidence: Evidence) -> Evaluation:
    """No function of the padding meets a None it cannot take."""
    return _errors(evidence, absent=True)


def other_errors(evidence: Evidence) -> Evaluation:
    """No function of the padding raises anything else."""
    return _errors(evidence, absent=False)


def sentence(evidence: Evidence, finding: Finding) -> str:
    event = evidence.recording.event("error", finding.row)
    function = event.text("function") or "a hooked function"
    name = function.rsplit(".", 1)[-1]
    doing = _HARMS.get(name, f"in {name}")
    frames = event.values.get("frames")
    place = f" at {frames[-1]}" if isinstance(frames, list) and frames else ""
    raised = event.text("type") or "an error"
    message = event.text("message") or ""
    kept = message and not message.startswith("blake2b:")
    said = f"{raised}: {message}" if kept else f"{raised}, whose text is not in the recording"
    if "NoneType" in message:
        return (
            f"{wording.who(finding)} fails while {doing}: a value that {name} uses is None "
            f"({said}){place}"
        )
    return f"{wording.who(finding)} fails while {doing}: {said}{place}"


def _errors(evidence: Evidence, *, absent: bool) -> Evaluation:
    result = Evaluation()
    watched = sum(evidence.count(kind) for kind in ("pad", "plan", "unpad", "sync"))
    result.evaluated = watched
    rows = np.arange(evidence.count("error"), dtype=np.int64)
    if not rows.size:
        return result
    types = evidence.column("error", "type")
    rows = rows[(evidence.is_text(types, *_ABSENT_TYPES) == absent) & ~_refusals(evidence)]
    if rows.size:
        zero = np.zeros_like(rows)
        result.violations.append(
            Violations(
                event_kind="error",
                rows=rows,
                left_name="errors expected",
                left=zero,
                right_name="errors",
                right=zero + 1,
                expected=zero,
                modes=_modes(evidence, rows),
                outcome="the server stops",
            )
        )
    return result


def _refusals(evidence: Evidence) -> BoolArray:
    """Errors that only repeat what a row contract says about a kernel call."""
    functions = evidence.column("error", "function")
    messages = evidence.column("error", "message")
    kernels = [
        index
        for index, text in enumerate(evidence.recording.strings)
        if text.rsplit(".", 1)[-1] in _KERNELS or text.startswith(_NUM_SPLITS)
    ]
    return np.asarray(np.isin(functions, kernels) | np.isin(messages, kernels))


def _modes(
    evidence: Evidence, rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Mode of the batch that was being worked on, from the batch's own event."""
    batches = np.arange(evidence.count("batch"), dtype=np.int64)
    names = ("process", "batch")
    index = evidence.last_before(
        (evidence.keys("batch", batches, *names), np.zeros_like(batches)),
        (evidence.keys("error", rows, *names), np.ones_like(rows)),
    )
    return evidence.snapshot("batch", "exit", "forward_mode", index)


CONTRACTS = (
    Contract(
        "PT701",
        "no None where a value is used",
        ("T7",),
        "no padding or planning function meets a None, or another value it cannot take",
        Severity.CRASH,
        """
An AttributeError or TypeError left a hooked function; the finding says which, and with what words
where these are in the recording.

Draft batches may come without hidden states. Padding them was guarded in 0.5.18, taking the padding
back was not: the unpad of a draft decode or draft-extend with hidden_states None raises
(sglang#30877). extend_prefix_lens_cpu and dp_padding_mode have been met as None as well
(sglang#36001, sglang#10009).
""",
        absent_values,
        sentence,
    ),
    Contract(
        "PT702",
        "no other error in the padding",
        ("T7", "T12"),
        "no padding or planning function raises",
        Severity.CRASH,
        """
An exception that left a hooked function and is not a kernel's refusal of row counts, which PT101
and PT104 tell.
""",
        other_errors,
        sentence,
    ),
)
