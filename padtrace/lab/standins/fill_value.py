"""The value an attention backend fills padded sequence lengths with.

`prepare_mlp_sync_batch` asks the backend for it. Two backends lack the answer on a CPU; what the
padding code does with the answer stays SGLang's.
"""

from typing import Any

from padtrace.lab.standins.targets import first_present

_CUDA_TWIN = "get_cuda_graph_seq_len_fill_value"
_CPU_TWIN = "get_cpu_graph_seq_len_fill_value"


def install() -> None:
    """Give the DSA backend its CUDA value on the CPU, and torch_native the usual 1."""
    dsa = first_present(
        "sglang.srt.layers.attention.dsa_backend", "sglang.srt.layers.attention.nsa_backend"
    )
    backend: Any = getattr(dsa, "DeepseekSparseAttnBackend", None) or dsa.NativeSparseAttnBackend
    if not hasattr(backend, _CPU_TWIN):
        setattr(backend, _CPU_TWIN, getattr(backend, _CUDA_TWIN))
    native = first_present("sglang.srt.layers.attention.torch_native_backend")
    for name in (_CUDA_TWIN, _CPU_TWIN):
        if name not in vars(native.TorchNativeAttnBackend):  # the base class only raises
            setattr(native.TorchNativeAttnBackend, name, _one)


def _one(backend: object) -> int:
    return 1
