"""Stand-ins for the kernels that a driven forward reaches, each with the checks of its contract.

A leaf computes no values: it checks the shapes that the kernel would check, and answers with a
tensor of the shape that the kernel would give. Code that pads, plans or chooses is never replaced.
A kernel without a stand-in is refused by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from padtrace.recording.model import Value
from padtrace.replay.devices import CPU
from padtrace.replay.worker.capabilities import Capabilities
from padtrace.replay.worker.copies import replace_copies
from padtrace.replay.worker.device import multi_processors
from padtrace.replay.worker.expand_kernel import interpreted
from padtrace.replay.worker.launches import LaunchJudge
from padtrace.replay.worker.obstacles import KERNELS, hollow_module, import_or_none
from padtrace.replay.worker.snapshots import rows
from padtrace.replay.worker.standins import NotHeldError, sglang_line

_METADATA_INTEGERS = 8
_PAGE = 64

_FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"
_JIT_LOADERS = ("sglang.kernels.jit.utils.compile.loader", "sglang.jit_kernel.utils")


def stand_in_for_packages() -> None:
    """What SGLang imports by name from a kernel package; before anything of SGLang is imported."""
    KERNELS["sgl_kernel"] = {"assign_draft_cache_locs_contiguous_cpu": draft_cache_locations}


class Leaves:
    """The kernels of one worker.

    Attributes:
        judge: asked about each FlashMLA launch; None lets every launch pass.
    """

    def __init__(self, capabilities: Capabilities, device: str) -> None:
        self._capabilities = capabilities
        self._device = device
        self._sm_parts = multi_processors(device)
        self.judge: LaunchJudge | None = None
        self._is_cuda: Any = None

    def install(self) -> None:
        """Put every stand-in in its place; done once."""
        backend = self._capabilities.dsa_module
        self._flash_mla()
        if hasattr(backend, "seqlens_expand_triton"):
            replace_everywhere("seqlens_expand_triton", backend, interpreted)
        setattr(backend, "flash_attn_varlen_func", flash_attn_varlen_func)  # noqa: B010
        if self._device != CPU:
            self._of_a_card(backend)

    def _flash_mla(self) -> None:
        interface = import_or_none(_FLASH_MLA)
        names: dict[str, Any] = {
            "get_mla_metadata": self.get_mla_metadata,
            "flash_mla_with_kvcache": self.flash_mla_with_kvcache,
        }
        if interface is None or not hasattr(interface, "flash_mla_with_kvcache"):
            package = sys.modules.get("sgl_kernel") or hollow_module("sgl_kernel")
            interface = hollow_module("sgl_kernel.flash_mla")
            package.flash_mla = interface  # type: ignore[attr-defined]
        for name, stand_in in names.items():
            # A function of its own, so that a probe can be put around it.
            setattr(interface, name, _function(stand_in, name))

    def get_mla_metadata(
        self, cache_seqlens: Any, *sizes: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Schedule int32 [SM parts, 8], and num_splits int32 [rows of cache_seqlens + 1]."""
        if cache_seqlens.dim() != 1 or cache_seqlens.dtype != torch.int32:
            raise RuntimeError(
                f"get_mla_metadata: cache_seqlens must be int32 [rows], is {cache_seqlens.dtype}"
                f" {list(cache_seqlens.shape)}"
            )
        schedule = torch.zeros((self._sm_parts, _METADATA_INTEGERS), dtype=torch.int32)
        return schedule, torch.zeros(cache_seqlens.shape[0] + 1, dtype=torch.int32)

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: Any = None,
        cache_seqlens: Any = None,
        head_dim_v: int = 512,
        tile_scheduler_metadata: Any = None,
        num_splits: Any = None,
        *more: Any,
        indices: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Zeros [rows, s_q, heads, head_dim_v], where the kernel takes the launch.

        Raises:
            RuntimeError: in the kernel's words.
        """
        if self.judge is not None:
            result = self.judge.judge(
                {
                    "q.shape": list(q.shape),
                    "q.dtype": str(q.dtype),
                    "k_cache.shape": list(k_cache.shape),
                    "k_cache.dtype": str(k_cache.dtype),
                    "indices.shape": None if indices is None else list(indices.shape),
                    "head_dim_v": head_dim_v,
                    "num_splits.rows": _rows(num_splits),
                    "cache_seqlens.rows": _rows(cache_seqlens),
                }
            )
            if result is not None and result.outcome == "refused":
                raise RuntimeError(result.error)
        return q.new_zeros((*q.shape[:-1], head_dim_v)), None

    def with_deep_gemm(self, on: bool) -> None:
        """Have the backend build DeepGEMM's schedule on a CPU engine too, or no more.

        A lab server with the real indexer does: its backend alone takes the CPU for a card.
        """
        backend = self._capabilities.dsa_module
        names = vars(backend)
        if self._device != CPU or not hasattr(backend, "is_cuda"):
            return
        self._is_cuda = self._is_cuda or names["is_cuda"]
        names["is_cuda"] = (lambda: True) if on else self._is_cuda
        # Releases import it at the head of the module, or where it is called (0.5.23).
        sys.modules["deep_gemm"] = names["deep_gemm"] = self._deep_gemm()

    def _deep_gemm(self) -> ModuleType:
        module = ModuleType("deep_gemm")
        sms = self._sm_parts
        module.get_num_sms = lambda: sms  # type: ignore[attr-defined]
        module.get_paged_mqa_logits_metadata = (  # type: ignore[attr-defined]
            get_paged_mqa_logits_metadata
        )
        return module

    def _of_a_card(self, backend: ModuleType) -> None:
        """What is reached only where a card is shown."""
        for name in _JIT_LOADERS:
            loader = import_or_none(name)
            if loader is not None and hasattr(loader, "load_jit"):
                replace_everywhere("load_jit", loader, lambda original: _no_compiler)
        deep_gemm = sys.modules["deep_gemm"] = self._deep_gemm()
        setattr(backend, "deep_gemm", deep_gemm)  # noqa: B010
        for module, name, stand_in in (
            ("sglang.kernels.ops.attention.utils", "concat_mla_absorb_q", concat_rows),
            ("sglang.kernels.ops.attention.utils", "concat_mla_absorb_q_general", concat_rows),
            ("sglang.kernels.ops.speculative.topk1", "draft_topk1_postprocess", draft_topk1),
        ):
            home = import_or_none(module)
            if home is not None and hasattr(home, name):
                replace_everywhere(name, home, _always(stand_in))


def replace_everywhere(name: str, home: ModuleType, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in the place of a function, also where SGLang copied its name."""
    original = getattr(home, name)
    made = make(original)
    setattr(home, name, made)
    replace_copies(name, original, made)


def flash_attn_varlen_func(q: torch.Tensor, k: Any, v: Any, **options: Any) -> torch.Tensor:
    """MHA over a whole prompt: q [tokens, heads, dim], v [KV tokens, heads, dim]; zeros.

    The kernel reads the cumulative lengths on the device, so rows beyond their end are no error.

    Raises:
        RuntimeError: k and v have not the same rows and heads.
    """
    if k.shape[:2] != v.shape[:2]:
        raise RuntimeError(
            f"flash_attn_varlen_func: k {list(k.shape)} and v {list(v.shape)} do not fit"
        )
    return q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block: int, sms: int) -> torch.Tensor:
    """DeepGEMM's schedule: int32 [SMs + 1, 2] for context lengths [requests, rows each]."""
    if context_lens.dim() != 2 or block != _PAGE:
        raise RuntimeError(
            f"get_paged_mqa_logits_metadata: context lengths {list(context_lens.shape)}, block"
            f" {block}"
        )
    return torch.zeros((sms + 1, 2), dtype=torch.int32)


def concat_rows(nope: torch.Tensor, rope: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """[rows, heads, a] and [rows, heads, b] to [rows, heads, a + b]."""
    return torch.cat([nope, rope], dim=-1)


def draft_topk1(
    logits: torch.Tensor, positions: torch.Tensor, tokens: Any = None, column: int = 0, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """One draft step of top-1: probabilities and tokens [requests, 1]; positions advance."""
    if positions.shape[0] != logits.shape[0]:
        raise RuntimeError(
            f"draft_topk1_postprocess: {logits.shape[0]} rows of logits,"
            f" {positions.shape[0]} positions"
        )
    index = torch.argmax(logits, dim=-1, keepdim=True)
    positions.add_(1)
    if tokens is not None:
        tokens[: index.shape[0], column : column + 1] = index
    return torch.ones_like(index, dtype=torch.float32), index


def draft_cache_locations(
    requests: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    locations: torch.Tensor,
    columns: int,
    topk: int,
    steps: int,
    *_: Any,
) -> None:
    """Places of the tokens to draft: int64 [requests x top-k x steps], filled in.

    Raises:
        RuntimeError: there are not so many places.
    """
    wanted = requests.shape[0] * topk * steps
    if locations.shape[0] != wanted or lengths.shape[0] != requests.shape[0]:
        raise RuntimeError(
            f"assign_draft_cache_locs_contiguous: {locations.shape[0]} places for"
            f" {requests.shape[0]} x {topk} x {steps}, {lengths.shape[0]} lengths"
        )
    locations.zero_()


def _no_compiler(*names: Any, **_: Any) -> Any:
    raise _no_stand_in("_".join(map(str, names)))


def _no_stand_in(kernel: str) -> NotHeldError:
    return NotHeldError(
        f"SGLang calls the kernel {kernel}, which has no stand-in",
        f"it is called at {sglang_line()}",
        "report this line to padtrace's maintainers",
    )


def _function(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def leaf(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    leaf.__name__ = leaf.__qualname__ = name
    leaf.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return leaf


def _always(stand_in: Any) -> Callable[[Any], Any]:
    return lambda original: stand_in


def _rows(value: Any) -> Value:
    return None if value is None else rows(value)
