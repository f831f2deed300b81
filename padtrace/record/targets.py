"""What is hooked in each release of SGLang, and what the absence of each costs the diagnosis.

The table asks for functions, never for version numbers. A target is looked for in the source
files where its module is not imported, so that neither the server nor `padtrace doctor` imports
anything for it. Releases read: 0.5.12, .15, .16, .17, .18, .20, .23.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Whether `attribute` (such as "ForwardBatch.init_new") is in `module`.
Look = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Target:
    """One row of the table.

    Attributes:
        hook: name in the coverage.
        probe: which probe is put around it, see `record.install`.
        candidates: "module:attribute", the home in the newest release first.
        cost: what a recording cannot say where none of them is there.
    """

    hook: str
    probe: str
    candidates: tuple[str, ...]
    cost: str


@dataclass(frozen=True, slots=True)
class DoctorRow:
    """One line of `padtrace doctor`: found, moved (at an older home) or absent.

    Attributes:
        outside: whether one of its homes is outside `sglang`, in a package of kernels.
    """

    hook: str
    status: str
    target: str
    cost: str
    outside: bool


_SRT = "sglang.srt."
_BATCH = _SRT + "model_executor.forward_batch_info:ForwardBatch."
_MODEL_RUNNER = _SRT + "model_executor.model_runner:ModelRunner."
_DSA = _SRT + "layers.attention.dsa_backend:"
_NSA = _SRT + "layers.attention.nsa_backend:"
_RUNNER = _SRT + "model_executor.runner."
_OLD_RUNNER = _SRT + "model_executor."
_SPEC = _SRT + "speculative."
_FACTORY = _SPEC + "draft_utils:DraftBackendFactory."
_FLASH_MLA = (
    "sglang.kernels.ops.attention.flash_mla_interface:",
    "sgl_kernel.flash_mla:",
)


def _dsa(method: str, *older: str) -> tuple[str, ...]:
    """The DSA backend's method; the class was NativeSparseAttnBackend in 0.5.12."""
    names = (method, *older)
    new = [f"{_DSA}DeepseekSparseAttnBackend.{name}" for name in names]
    return (*new, *(f"{_NSA}NativeSparseAttnBackend.{name}" for name in names))


def _multi_step(method: str, *older: str) -> tuple[str, ...]:
    names = (method, *older)
    new = [f"{_DSA}DeepseekSparseAttnMultiStepBackend.{name}" for name in names]
    return (*new, *(f"{_NSA}NativeSparseAttnMultiStepBackend.{name}" for name in names))


def _eagle(file: str, cls: str, method: str, older: str) -> tuple[str, ...]:
    home = f"{_SPEC}{file}:{cls}."
    return home + method, home + older


_NO_PLAN = "rows planned by the DSA backend; without them only launches show a mismatch"
_NO_GRAPH = "why a batch ran in a graph or not, and at which size"
_NO_LAUNCH = "rows that reached the kernel; the plan and the padded batch are judged instead"

TARGETS = (
    Target("forward", "forward", (_MODEL_RUNNER + "forward",), "which forward an event belongs to"),
    Target("init_new", "init_new", (_BATCH + "init_new",), "the batch before anything padded it"),
    Target(
        "init_mlp_sync_metadata",
        "sync",
        (_BATCH + "init_mlp_sync_metadata",),
        "nothing: before 0.5.18 the counts are taken when init_new returns",
    ),
    Target(
        "mark_forward_metadata_ready",
        "ready",
        (_BATCH + "mark_forward_metadata_ready",),
        "nothing: before 0.5.15 the flag skip_attn_backend_init of forward is read",
    ),
    Target(
        "prepare_mlp_sync_batch",
        "pad",
        (_BATCH + "prepare_mlp_sync_batch",),
        "the pad itself: q's rows before and after, and the padding mode",
    ),
    Target(
        "_pad_inputs_to_size",
        "pad_inputs",
        (_BATCH + "_pad_inputs_to_size",),
        "rows asked of the pad, and pads outside prepare_mlp_sync_batch",
    ),
    Target(
        "post_forward_mlp_sync_batch",
        "unpad",
        (_BATCH + "post_forward_mlp_sync_batch",),
        "whether the batch is taken back to its own rows",
    ),
    Target(
        "prepare_mlp_sync_batch_raw",
        "step",
        (
            _SRT + "managers.scheduler_components.dp_attn:prepare_mlp_sync_batch_raw",
            _SRT + "managers.scheduler_dp_attn_mixin:prepare_mlp_sync_batch_raw",
        ),
        "the step number; rounds of run_batch are counted instead",
    ),
    Target(
        "run_batch",
        "round",
        (_SRT + "managers.scheduler:Scheduler.run_batch",),
        "rounds where no sync collective runs",
    ),
    Target(
        "init_attention_backend",
        "backends",
        (_MODEL_RUNNER + "init_attention_backends", _MODEL_RUNNER + "init_attention_backend"),
        "plans of backends other than DSA, and facts where no forward is ever begun",
    ),
    Target(
        "create_decode_backend",
        "draft_backend",
        (_FACTORY + "create_decode_backend",),
        "plans of the draft's backends other than DSA",
    ),
    Target(
        "create_draft_extend_backend",
        "draft_backend",
        (_FACTORY + "create_draft_extend_backend",),
        "plans of the draft-extend backends other than DSA",
    ),
    Target("dsa.init_forward_metadata", "plan", _dsa("init_forward_metadata"), _NO_PLAN),
    Target(
        "dsa.init_forward_metadata_out_graph",
        "plan",
        _dsa("init_forward_metadata_out_graph", "init_forward_metadata_replay_cuda_graph"),
        "plans for a graph bucket",
    ),
    Target(
        "dsa.init_forward_metadata_capture_cuda_graph",
        "plan",
        _dsa("init_forward_metadata_capture_cuda_graph"),
        "nothing: since 0.5.15 capture plans through init_forward_metadata_out_graph",
    ),
    Target(
        "dsa.init_forward_metadata_replay_cuda_graph_from_precomputed",
        "plan",
        _dsa("init_forward_metadata_replay_cuda_graph_from_precomputed"),
        "draft plans copied from one precomputed plan",
    ),
    Target(
        "dsa._compute_flashmla_metadata",
        "flashmla_metadata",
        _dsa("_compute_flashmla_metadata"),
        "the rows num_splits was made for; its length still shows",
    ),
    Target(
        "dsa.slice",
        "slice",
        (_DSA + "DSAFlashMLAMetadata.slice", _NSA + "NSAFlashMLAMetadata.slice"),
        "whether a graph bucket's slice of num_splits is as long as asked",
    ),
    Target(
        "dsa_multi_step.init_forward_metadata",
        "plan",
        _multi_step("init_forward_metadata"),
        "that the steps of a draft were planned together",
    ),
    Target(
        "dsa_multi_step.init_forward_metadata_out_graph",
        "plan",
        _multi_step("init_forward_metadata_out_graph", "init_forward_metadata_replay_cuda_graph"),
        "draft plans for a graph bucket; the fused copies happen inside it",
    ),
    Target(
        "dsa_multi_step.init_forward_metadata_capture_cuda_graph",
        "plan",
        _multi_step("init_forward_metadata_capture_cuda_graph"),
        "nothing: since 0.5.15 capture plans through init_forward_metadata_out_graph",
    ),
    Target(
        "decode_graph.can_run_graph",
        "judge",
        (
            _RUNNER + "decode_cuda_graph_runner:DecodeCudaGraphRunner.can_run_graph",
            _OLD_RUNNER + "cuda_graph_runner:CudaGraphRunner.can_run",
        ),
        _NO_GRAPH,
    ),
    Target(
        "decode_graph.load_batch",
        "load",
        (
            _RUNNER + "decode_cuda_graph_runner:DecodeCudaGraphRunner.load_batch",
            _OLD_RUNNER + "cuda_graph_runner:CudaGraphRunner.replay_prepare",
        ),
        _NO_GRAPH,
    ),
    Target(
        "decode_graph._max_dp_batch_size",
        "largest",
        (_RUNNER + "decode_cuda_graph_runner:DecodeCudaGraphRunner._max_dp_batch_size",),
        "the number the bucket was chosen for, where can_run_graph refuses; new in 0.5.18",
    ),
    Target(
        "_pad_to_bucket",
        "bucket",
        (_RUNNER + "base_cuda_graph_runner:BaseCudaGraphRunner._pad_to_bucket",),
        "the number a bucket was chosen for; new in 0.5.15",
    ),
    Target(
        "prefill_graph.can_run_graph",
        "judge",
        (
            _RUNNER + "prefill_cuda_graph_runner:PrefillCudaGraphRunner.can_run_graph",
            _OLD_RUNNER + "piecewise_cuda_graph_runner:PiecewiseCudaGraphRunner.can_run",
        ),
        _NO_GRAPH,
    ),
    Target(
        "prefill_graph.load_batch",
        "load",
        (
            _RUNNER + "prefill_cuda_graph_runner:PrefillCudaGraphRunner.load_batch",
            _OLD_RUNNER + "piecewise_cuda_graph_runner:PiecewiseCudaGraphRunner.replay_prepare",
        ),
        _NO_GRAPH,
    ),
    Target(
        "eagle_draft_graph.can_run_graph",
        "judge",
        _eagle(
            "eagle_draft_cuda_graph_runner",
            "EAGLEDraftCudaGraphRunner",
            "can_run_graph",
            "can_run",
        ),
        _NO_GRAPH,
    ),
    Target(
        "eagle_draft_graph.execute",
        "load",
        _eagle("eagle_draft_cuda_graph_runner", "EAGLEDraftCudaGraphRunner", "execute", "replay"),
        _NO_GRAPH,
    ),
    Target(
        "eagle_draft_extend_graph.can_run_graph",
        "judge",
        _eagle(
            "eagle_draft_extend_cuda_graph_runner",
            "EAGLEDraftExtendCudaGraphRunner",
            "can_run_graph",
            "can_run",
        ),
        _NO_GRAPH,
    ),
    Target(
        "eagle_draft_extend_graph.execute",
        "load",
        _eagle(
            "eagle_draft_extend_cuda_graph_runner",
            "EAGLEDraftExtendCudaGraphRunner",
            "execute",
            "replay",
        ),
        _NO_GRAPH,
    ),
    Target(
        "flash_mla_with_kvcache",
        "launch",
        tuple(home + "flash_mla_with_kvcache" for home in _FLASH_MLA),
        _NO_LAUNCH,
    ),
    Target(
        "get_mla_metadata",
        "launch",
        tuple(home + "get_mla_metadata" for home in _FLASH_MLA),
        "rows given to FlashMLA's scheduler; the plan still shows the result",
    ),
    Target(
        "fp8_paged_mqa_logits",
        "launch",
        ("deep_gemm:fp8_paged_mqa_logits",),
        "rows that reached the indexer's kernel",
    ),
    Target(
        "get_paged_mqa_logits_metadata",
        "launch",
        ("deep_gemm:get_paged_mqa_logits_metadata",),
        "rows given to the indexer's scheduler",
    ),
)

# Not hooked, but a patch to one of them is what people try first: their source is fingerprinted.
CALCULATORS = (
    _SRT + "layers.attention.dsa.utils:cal_padded_tokens",
    _SRT + "layers.attention.dsa.utils:pad_dsa_cache_seqlens",
    _SRT + "layers.attention.nsa.utils:cal_padded_tokens",
    _SRT + "layers.attention.nsa.utils:pad_nsa_cache_seqlens",
    _SRT + "layers.dp_attention:DpPaddingMode.get_dp_padding_mode",
    _SRT + "speculative.spec_info:spec_scale_global_num_tokens",
)


def choose(target: Target, look: Look) -> tuple[str, str]:
    """("found" | "moved" | "absent", the candidate that is there or "")."""
    for index, candidate in enumerate(target.candidates):
        module, _, attribute = candidate.partition(":")
        if look(module, attribute):
            return ("found" if index == 0 else "moved"), candidate
    return "absent", ""


def doctor_rows(look: Look | None = None) -> list[DoctorRow]:
    """The table for one SGLang, by default the one this interpreter would import.

    Args:
        look: `source_look(folder)` for an unpacked release or a checkout.
    """
    rows = []
    for target in TARGETS:
        status, candidate = choose(target, look or live_look)
        outside = any(not home.startswith("sglang.") for home in target.candidates)
        dotted = candidate.replace(":", ".")
        rows.append(DoctorRow(target.hook, status, dotted, target.cost, outside))
    return rows


def live_look(module: str, attribute: str) -> bool:
    """In this interpreter: the module itself if it is imported, otherwise its source."""
    loaded = sys.modules.get(module)
    if loaded is not None and not _still_importing(loaded):
        return resolve(loaded, attribute) is not None
    return _in_file(_find(module), attribute)


def source_look(root: Path) -> Look:
    """In a folder that holds `sglang/`; other packages are looked for in this interpreter."""

    def look(module: str, attribute: str) -> bool:
        if module.split(".")[0] != "sglang":
            return live_look(module, attribute)
        return _in_file(_module_file(root, module.split(".")), attribute)

    return look


def resolve(module: Any, attribute: str) -> Any:
    """The object at a dotted attribute, or None."""
    found = module
    for name in attribute.split("."):
        found = getattr(found, name, None)
        if found is None:
            return None
    return found


def _still_importing(module: Any) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


@cache
def _find(module: str) -> Path | None:
    """The file of a module, found without importing any part of it."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        path = _module_file(Path(folder).parent, [top, *rest])
        if path is not None:
            return path
    return None


def _module_file(root: Path, parts: list[str]) -> Path | None:
    base = root.joinpath(*parts)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return next(iter(base.parent.glob(f"{base.name}.*.so")), None)


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _in_file(path: Path | None, attribute: str) -> bool:
    """Whether a source file defines a function, or a method in the body of its class."""
    if path is None:
        return False
    if path.suffix != ".py":
        return True  # compiled: nobody can tell before it is imported
    text = _text(path)
    names = attribute.split(".")
    if len(names) == 1:
        return re.search(rf"^(?:async )?def {names[0]}\b|\b{names[0]}\b", text, re.M) is not None
    start = re.search(rf"^class {names[0]}\b", text, re.M)
    if start is None:
        return False
    end = re.compile(r"^(?:class|def|@|[A-Za-z_])", re.M).search(text, start.end() + 1)
    body = text[start.end() : end.start() if end else len(text)]
    return re.search(rf"^\s+(?:async )?def {names[1]}\b", body, re.M) is not None
