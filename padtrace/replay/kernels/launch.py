"""Replay one recorded launch: tensors of the recorded shapes, one call, what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from padtrace.replay.kernels.error_text import own_words
from padtrace.replay.kernels.interface import (
    DecodeResult,
    FlashMlaKernel,
    Plan,
    PlanRequest,
)
from padtrace.replay.kernels.launch_shapes import LaunchLimits, LaunchShapes, Outcome
from padtrace.replay.kernels.reference.kernel import ReferenceKernel
from padtrace.replay.kernels.reference.words import NotCoveredError
from padtrace.replay.kernels.tensors import build_request, check_recorded, check_size


@dataclass(frozen=True)
class LaunchResult:
    """What a replayed launch gave.

    Attributes:
        kernel: name of the implementation.
        outcome: ``pass``; ``refused`` by the kernel, see ``error``; ``undefined``: the kernel
            would not stop, but its result is not defined, see ``hazards``; ``not-covered`` by the
            reference; ``not-called``: too large, see ``error``; ``ended``: the call ended the
            kernel process, as it ends a server; ``interrupted``: that process was killed from
            outside or did not answer in time, which says nothing of the launch.
        stage: ``plan`` or ``decode``, the call that was refused; None otherwise.
        error: the kernel's own words, without file names; None after a pass.
        raw_error: the same as the kernel gave it.
        q_rows: first dimension of q.
        num_splits_rows: length of ``num_splits`` in the call; None where it carried none.
        num_splits: its values; None where the plan was refused.
        computed: False where only arguments and schedule were judged.
        out: output, where computed.
        lse: log-sum-exp, where computed.
        hazards: see :class:`~padtrace.replay.kernels.interface.DecodeResult`.
    """

    kernel: str
    outcome: Outcome
    stage: Literal["plan", "decode"] | None
    error: str | None
    raw_error: str | None
    q_rows: int
    num_splits_rows: int | None
    num_splits: tuple[int, ...] | None
    computed: bool
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    hazards: tuple[str, ...] = ()

    @property
    def num_splits_expected(self) -> int:
        """Entries that the kernel wants: one more than q has rows."""
        return self.q_rows + 1


def run_launch(
    kernel: FlashMlaKernel,
    launch: LaunchShapes,
    seed: int = 0,
    *,
    limits: LaunchLimits | None = None,
    recorded: Mapping[str, torch.Tensor] | None = None,
) -> LaunchResult:
    """Build the launch's tensors, call the kernel, and tell what came of it.

    Tensors hold the recorded values where there are any, seeded random ones otherwise. Whatever
    the kernel raises is told in the result; nothing it raises leaves this function.

    Args:
        kernel: the implementation.
        launch: the recorded launch.
        seed: for the random values.
        limits: bounds on memory and work.
        recorded: argument tensors of a recording of the ``full`` tier, by their names in
            :class:`~padtrace.replay.kernels.interface.DecodeRequest`; the others are built.

    Raises:
        BadRecordingError: numbers that no launch can have, or a recorded tensor that is no
            argument of the call.
    """
    launch.check()
    recorded = check_recorded(recorded or {})
    size = check_size(launch)
    limits = limits or LaunchLimits()
    values = True
    if isinstance(kernel, ReferenceKernel):
        if size > limits.max_bytes or _work(launch) > limits.max_work:
            kernel = kernel.without_compute()
        values = kernel.compute
    else:
        reason = _why_not_call(launch, size, limits)
        if reason:
            return _result(kernel, launch, "not-called", None, None, reason, reason)
    plan: Plan | None = None
    stage: Literal["plan", "decode"] = "plan"
    try:
        plan = plan_of(kernel, launch)
        stage = "decode"
        request = build_request(launch, plan, kernel.device, seed, values=values)
        if values:
            moved: dict[str, Any] = {
                name: tensor.to(kernel.device) for name, tensor in recorded.items()
            }
            request = replace(request, **moved)
        answer = kernel.flash_mla_with_kvcache(request)
        if kernel.device.type == "cuda":
            torch.cuda.synchronize()
    except NotCoveredError as error:
        return _result(kernel, launch, "not-covered", None, plan, str(error), str(error))
    except Exception as error:
        return _result(kernel, launch, "refused", stage, plan, _words(error), str(error))
    return _passed(kernel, launch, plan, answer)


def _why_not_call(launch: LaunchShapes, size: int, limits: LaunchLimits) -> str:
    """Why a real kernel must not get this launch; empty where it may.

    Some dense calls pass every check and then end the process: head size 512 meets
    ``FLASH_ASSERT(params.d == Config::HEAD_DIM_K)``, and zero heads are divided by.
    """
    if size > limits.max_bytes:
        return f"its arguments take {size} bytes, the bound is {limits.max_bytes}"
    if launch.indices_shape is not None or len(launch.q_shape) != 4:
        return ""
    _, s_q, heads, d_qk = launch.q_shape
    if launch.num_heads_k == 0 or s_q * heads < launch.num_heads_k:
        return "the library would divide by zero and end this process"
    if d_qk == 512 and launch.q_dtype in ("bfloat16", "float16"):
        return "the library would end this process: Assertion failed: params.d == 576"
    return ""


def plan_of(kernel: FlashMlaKernel, launch: LaunchShapes) -> Plan | None:
    """The schedule tensors of a launch: planned for ``num_splits_rows - 1`` rows.

    Where ``num_splits`` was recorded, its values replace the planned ones. A launch without
    ``num_splits`` gets no plan and leaves planning to the call.
    """
    rows = launch.splits_rows
    if rows is None:
        return None
    heads = launch.q_shape[2] if len(launch.q_shape) > 2 else 64
    s_q = launch.q_shape[1] if len(launch.q_shape) > 1 else 1
    sparse = launch.indices_shape is not None and len(launch.indices_shape) > 0
    topk = launch.indices_shape[-1] if launch.indices_shape and sparse else None
    dense_fp8 = not sparse and launch.q_dtype == "float8_e4m3fn"
    plan = kernel.get_mla_metadata(
        PlanRequest(
            cache_seqlens=_seqlens_for_plan(launch, max(rows - 1, 0), kernel.device),
            num_q_tokens_per_head_k=s_q * heads // max(launch.num_heads_k, 1),
            num_heads_k=launch.num_heads_k,
            num_heads_q=heads,
            is_fp8_kvcache=sparse or dense_fp8,
            topk=topk,
        )
    )
    if launch.num_splits is None and rows == plan.num_splits.shape[0]:
        return plan
    # Without recorded values only a length of 0 or 1 comes here: no plan has so few entries.
    recorded = [0] * rows if launch.num_splits is None else list(launch.num_splits)
    values = torch.tensor(recorded, dtype=torch.int32, device=kernel.device)
    return Plan(plan.tile_scheduler_metadata, values)


def _seqlens_for_plan(launch: LaunchShapes, rows: int, device: torch.device) -> torch.Tensor:
    known = [max(value, 0) for value in (launch.cache_seqlens or ())][:rows]
    # At least one row, since a plan of none is refused.
    lengths = known + [1] * (max(rows, 1) - len(known))
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def _words(error: Exception) -> str:
    return own_words(error) or f"{type(error).__name__} without words"


def _work(launch: LaunchShapes) -> int:
    """Multiply-adds of the attention, as far as shapes tell."""
    shape = launch.q_shape
    if len(shape) != 4:
        return 0
    if launch.indices_shape is not None:
        per_token = launch.indices_shape[-1] if launch.indices_shape else 0
    else:
        table = launch.block_table_shape
        per_token = 64 * (table[1] if table is not None and len(table) > 1 else 0)
    return math.prod(shape[:3]) * per_token * (shape[3] + launch.head_dim_v)


def _passed(
    kernel: FlashMlaKernel, launch: LaunchShapes, plan: Plan | None, answer: DecodeResult
) -> LaunchResult:
    outcome: Outcome = "undefined" if answer.hazards else "pass"
    used = plan or answer.plan
    result = _result(kernel, launch, outcome, None, used, None, None)
    return LaunchResult(
        **{
            **vars(result),
            "computed": answer.out is not None,
            "out": answer.out,
            "lse": answer.lse,
            "hazards": answer.hazards,
        }
    )


def _result(
    kernel: FlashMlaKernel,
    launch: LaunchShapes,
    outcome: Outcome,
    stage: Literal["plan", "decode"] | None,
    plan: Plan | None,
    error: str | None,
    raw: str | None,
) -> LaunchResult:
    values: tuple[int, ...] | None = None
    if plan is not None:
        try:
            values = tuple(int(value) for value in plan.num_splits.tolist())
        except RuntimeError:
            # After an illegal access the CUDA context answers nothing any more.
            values = None
    return LaunchResult(
        kernel=kernel.name,
        outcome=outcome,
        stage=stage,
        error=error,
        raw_error=raw,
        q_rows=launch.q_rows,
        num_splits_rows=launch.splits_rows,
        num_splits=values,
        computed=False,
    )
