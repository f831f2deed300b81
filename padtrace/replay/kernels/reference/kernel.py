"""The reference behind the common interface."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from padtrace.replay.kernels.generations import SGL_FLASH_MLA_1, Generation
from padtrace.replay.kernels.interface import (
    Availability,
    DecodeRequest,
    DecodeResult,
    Plan,
    PlanRequest,
)
from padtrace.replay.kernels.reference import attention, schedule
from padtrace.replay.kernels.reference.check_dense import (
    check_dense,
    check_dense_fp8,
    check_dense_wrapper,
    is_dense_fp8,
)
from padtrace.replay.kernels.reference.check_plan import (
    check_plan,
    planned_heads,
    planned_s_q,
    uses_dense_fp8,
)
from padtrace.replay.kernels.reference.check_sparse import (
    SparseCall,
    check_sparse,
    check_sparse_launch,
    check_sparse_schedule,
    check_sparse_wrapper,
)
from padtrace.replay.kernels.reference.gather import DenseKeys, SparseKeys
from padtrace.replay.kernels.reference.gpu import DEFAULT_GPU, GpuModel
from padtrace.replay.kernels.reference.words import Checks


class ReferenceKernel:
    """FlashMLA's decode path in torch: same checks, same schedule, attention in float64.

    Args:
        gpu: the card to imitate; decides the number of SM parts and the sparse implementation.
        generation: whose words to use.
        compute: False to stop after the checks and the schedule; results then hold no output.
        device: where argument tensors live; a CUDA device works too and is faster.
    """

    def __init__(
        self,
        gpu: GpuModel = DEFAULT_GPU,
        generation: Generation = SGL_FLASH_MLA_1,
        *,
        compute: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.gpu = gpu
        self.generation = generation
        self.compute = compute
        self._device = torch.device(device)
        self._checks = Checks(generation)

    @property
    def name(self) -> str:
        """``reference`` with the card and the wording it imitates."""
        return f"reference ({self.gpu.name}, {self.generation.key})"

    @property
    def device(self) -> torch.device:
        """Where argument tensors live."""
        return self._device

    def availability(self) -> Availability:
        """Always usable."""
        return Availability(True, "computed by padtrace; no CUDA needed")

    def without_compute(self) -> ReferenceKernel:
        """The same reference, judging arguments and schedule only."""
        return ReferenceKernel(self.gpu, self.generation, compute=False, device=self._device)

    def get_mla_metadata(self, request: PlanRequest) -> Plan:
        """Plan as ``get_mla_decoding_metadata`` (or its dense FP8 twin) does."""
        check_plan(request, self._checks)
        batch = request.cache_seqlens.shape[0]
        if uses_dense_fp8(request):
            parts = schedule.dense_fp8_sm_parts(
                self.gpu, request.num_q_tokens_per_head_k, request.num_heads_k
            )
            found = schedule.dense_fp8_schedule(request.cache_seqlens.tolist(), parts)
            return found.plan(self._device)
        sparse = request.topk is not None
        parts = schedule.plan_sm_parts(
            self.gpu, planned_s_q(request), planned_heads(request), request.num_heads_k, sparse
        )
        if request.topk is not None:
            lengths = schedule.sparse_lengths(batch, request.topk, extra_topk=-1)
        else:
            lengths = request.cache_seqlens.tolist()
        return schedule.tile_schedule(lengths, parts).plan(self._device)

    def flash_mla_with_kvcache(self, request: DecodeRequest) -> DecodeResult:
        """Run one decode call; which operator is chosen as the Python wrappers choose."""
        if request.softmax_scale is None:
            request = replace(request, softmax_scale=request.q.shape[-1] ** -0.5)
        if request.indices is not None:
            return self._sparse(request)
        check_dense_wrapper(request, self._checks)
        if is_dense_fp8(request):
            return self._dense_fp8(request)
        return self._dense(request)

    def _sparse(self, request: DecodeRequest) -> DecodeResult:
        check_sparse_wrapper(request, self.generation)
        call = check_sparse(request, self._checks, self.gpu)
        metadata, num_splits = request.tile_scheduler_metadata, request.num_splits
        if metadata is None:
            plan = self._own_sparse_plan(request, call)
            metadata, num_splits = plan.tile_scheduler_metadata, plan.num_splits
        assert num_splits is not None, "num_splits is given with tile_scheduler_metadata"
        check_sparse_schedule(call, metadata, num_splits, self._checks)
        check_sparse_launch(call, request)
        plan = Plan(metadata, num_splits)
        if not self.compute:
            return DecodeResult(None, None, plan)
        hazards = attention.Hazards()
        source = SparseKeys(request, call, hazards)
        store = self._store(request, plan, call.s_q * call.h_q)
        for piece in attention.pieces(metadata.tolist(), call.b, source.blocks_of, hazards):
            q = request.q[piece.row].double()
            out, lse = attention.attend(q, source.keys(piece), self._scale(request), 512)
            self._write(store, piece, plan, out, lse, self._sink(request, call.s_q), hazards)
        store.combine(num_splits.tolist(), self._sink(request, call.s_q), False, hazards)
        return self._result(request, store, plan, hazards)

    def _own_sparse_plan(self, request: DecodeRequest, call: SparseCall) -> Plan:
        topk_length, extra = request.topk_length, request.extra_topk_length
        lengths = schedule.sparse_lengths(
            call.b,
            call.topk,
            extra_topk=call.extra_topk,
            topk_length=None if topk_length is None else topk_length.tolist(),
            extra_topk_length=None if extra is None else extra.tolist(),
        )
        found = schedule.tile_schedule(
            lengths,
            call.implementation.num_sm_parts,
            fixed_overhead_num_blocks=call.implementation.fixed_overhead_num_blocks,
        )
        return found.plan(self._device)

    def _dense(self, request: DecodeRequest) -> DecodeResult:
        parts = check_dense(request, self._checks, self.gpu)
        if request.tile_scheduler_metadata is None or request.num_splits is None:
            assert request.cache_seqlens is not None
            plan = schedule.tile_schedule(request.cache_seqlens.tolist(), parts).plan(self._device)
        else:
            plan = Plan(request.tile_scheduler_metadata, request.num_splits)
        if not self.compute:
            return DecodeResult(None, None, plan)
        hazards = attention.Hazards()
        s_q = request.q.shape[1]
        source = DenseKeys(request, request.causal and s_q > 1, hazards)
        todo = attention.pieces(
            plan.tile_scheduler_metadata.tolist(), request.q.shape[0], source.blocks_of, hazards
        )
        return self._run_dense(request, plan, source, list(todo), hazards)

    def _dense_fp8(self, request: DecodeRequest) -> DecodeResult:
        check_dense_fp8(request, self._checks, self.gpu)
        assert request.tile_scheduler_metadata is not None
        assert request.num_splits is not None
        plan = Plan(request.tile_scheduler_metadata, request.num_splits)
        if not self.compute:
            return DecodeResult(None, None, plan)
        hazards = attention.Hazards()
        source = DenseKeys(request, request.causal and request.q.shape[1] > 1, hazards)
        todo = attention.pieces_dense_fp8(plan.tile_scheduler_metadata.tolist(), source.seq_lens)
        return self._run_dense(request, plan, source, list(todo), hazards)

    def _run_dense(
        self,
        request: DecodeRequest,
        plan: Plan,
        source: DenseKeys,
        todo: list[attention.Piece],
        hazards: attention.Hazards,
    ) -> DecodeResult:
        _, s_q, h_q, _ = request.q.shape
        h_k = request.k_cache.shape[2]
        fp8 = is_dense_fp8(request)
        store = self._store(request, plan, s_q * h_q)
        key_scale = float(request.descale_k) if fp8 and request.descale_k is not None else 1.0
        for piece in todo:
            per_head = []
            for head in range(h_k):
                q = request.q[piece.row].double()[:, head * (h_q // h_k) : (head + 1) * h_q // h_k]
                found = source.keys(piece, head)
                out, lse = attention.attend(q, found, self._scale(request), 512)
                pairs = (s_q, h_q // h_k)
                per_head.append((out.reshape(*pairs, 512) * key_scale, lse.reshape(pairs)))
            out = torch.cat([one[0] for one in per_head], dim=1).reshape(s_q * h_q, 512)
            lse = torch.cat([one[1] for one in per_head], dim=1).reshape(s_q * h_q)
            # The dense kernels take a sum that is not a number for an empty one.
            lse = torch.where(lse.isnan(), -math.inf, lse)
            self._write(store, piece, plan, out, lse, None, hazards)
        store.combine(plan.num_splits.tolist(), None, fp8, hazards)
        return self._result(request, store, plan, hazards)

    def _scale(self, request: DecodeRequest) -> float:
        assert request.softmax_scale is not None
        scale = request.softmax_scale
        if (
            is_dense_fp8(request)
            and request.descale_q is not None
            and request.descale_k is not None
        ):
            scale *= float(request.descale_q) * float(request.descale_k)
        return scale

    def _sink(self, request: DecodeRequest, s_q: int) -> torch.Tensor | None:
        if request.attn_sink is None:
            return None
        return request.attn_sink.double().repeat(s_q)

    def _store(self, request: DecodeRequest, plan: Plan, pairs: int) -> attention.Accumulators:
        parts = plan.tile_scheduler_metadata.shape[0]
        return attention.Accumulators(request.q.shape[0], pairs, 512, parts, request.q.device)

    def _write(
        self,
        store: attention.Accumulators,
        piece: attention.Piece,
        plan: Plan,
        out: torch.Tensor,
        lse: torch.Tensor,
        sink: torch.Tensor | None,
        hazards: attention.Hazards,
    ) -> None:
        if not piece.whole:
            index = int(plan.num_splits[piece.row]) + piece.split
            store.write_partial(index, out, lse, hazards)
            return
        if sink is not None:
            out = out * attention.sink_factor(lse, sink).unsqueeze(-1)
        store.write_whole(piece.row, out, torch.where(lse == -math.inf, math.inf, lse))

    def _result(
        self,
        request: DecodeRequest,
        store: attention.Accumulators,
        plan: Plan,
        hazards: attention.Hazards,
    ) -> DecodeResult:
        b, s_q, h_q, _ = request.q.shape
        dtype = torch.bfloat16 if is_dense_fp8(request) else request.q.dtype
        out = store.out.reshape(b, s_q, h_q, 512).to(dtype)
        lse = store.lse.reshape(b, s_q, h_q).transpose(1, 2).float()
        return DecodeResult(out, lse, plan, hazards.told())
