"""What a lab server is started with: environment, arguments, port. Pure functions, no process.

The server's interpreter must have padtrace installed (`pip install padtrace`, or `-e` a checkout):
SGLang finds the stand-ins through the entry point `padtrace_lab` of its plugin group, and a path
alone gives no entry point. It must have a CPU or CUDA torch and what SGLang imports; SGLang itself
may be installed there or given as a folder. Seen to serve: 0.5.16 to 0.5.23; older releases lack
the CPU branches of speculative decoding.

Further switches, for `base_env`: PADTRACE_LAB_SPAWN=1 starts processes as SGLang does, at two to
three times the start-up time.
"""

import os
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from padtrace.children import python_environment
from padtrace.errors import EnvironmentMissingError, UsageError

LabModel = Literal["dsa", "dense"]

_HERE = Path(__file__).resolve().parent
# SGLang binds some ports a little above its own for its workers, and some 233 above and more.
_PORTS = (20000, 32000)
_PORT_OFFSETS = (*range(32), *range(233, 245))
_PORT_TRIES = 50
SITE = _HERE / "site"
MODELS = _HERE / "models"

_SWITCHES = {
    "PADTRACE_LAB": "1",
    # The lab is a CPU server also where there is a GPU: its stand-ins would meet real kernels.
    "CUDA_VISIBLE_DEVICES": "",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    # Triton kernels that no stand-in replaces run interpreted.
    "TRITON_INTERPRET": "1",
    # The second version of the top-k plan is a JIT-compiled CUDA kernel.
    "SGLANG_OPT_USE_TOPK_V2": "0",
    # Compiling the model's small helpers costs seconds per new shape.
    "TORCHDYNAMO_DISABLE": "1",
    # The ranks share few cores; more threads only wait for each other.
    "OMP_NUM_THREADS": "1",
    # SGLang warms up by a request to itself, which must not leave by a proxy.
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}

_COMMON_ARGUMENTS = [
    "--device=cpu",
    "--load-format=dummy",
    "--skip-tokenizer-init",
    "--mem-fraction-static=0.05",
    "--max-total-tokens=4096",
    "--max-running-requests=16",
    "--host=127.0.0.1",
]
_MODEL_ARGUMENTS: dict[LabModel, tuple[str, list[str]]] = {
    "dsa": (
        "tiny-dsa",
        [
            "--attention-backend=dsa",
            "--dsa-decode-backend=flashmla_kv",
            "--dsa-prefill-backend=flashmla_kv",
            "--kv-cache-dtype=fp8_e4m3",
            "--disable-cuda-graph",
        ],
    ),
    "dense": ("tiny-qwen3", ["--attention-backend=torch_native", "--disable-overlap-schedule"]),
}


def lab_environment(
    base_env: Mapping[str, str],
    *,
    sglang_root: Path | None,
    ranks: int,
    real_indexer: bool = True,
    fix_30642: bool = False,
    cores: Sequence[int] | None = None,
) -> dict[str, str]:
    """The environment of a lab server, from the one it is started in.

    Args:
        base_env: usually `os.environ`; what it says of SGLANG_* and padtrace stays, its PYTHONPATH
            does not.
        sglang_root: an unpacked wheel or a checkout; None for the SGLang of the interpreter.
        ranks: processes that run a model (the tensor-parallel size of the server).
        real_indexer: run SGLang's own DSA indexer on stand-in kernels; otherwise a stub.
        fix_30642: the counter-test with PR #30642's alignment; touches code under test.
        cores: CPU cores to bind ranks to, in turn; by default those this process may use.

    Raises EnvironmentMissingError when sglang_root holds no SGLang, UsageError when ranks < 1.
    """
    if ranks < 1:
        raise UsageError(f"a server cannot have {ranks} ranks", hint="Give --tp 1 or more.")
    path = [SITE] if sglang_root is None else [_python_root(sglang_root), SITE]
    environment = python_environment({**base_env, **_SWITCHES}, *path)
    # Without cached bytecode every one of the 4 to 12 processes compiles SGLang anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # SGLang wants one entry per rank, also where ranks share a core.
    available = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    bound = (str(available[rank % len(available)]) for rank in range(ranks))
    environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    if environment.get("SGLANG_PLUGINS"):  # an allow list that does not know of us
        environment["SGLANG_PLUGINS"] += ",padtrace_lab"
    if real_indexer:
        environment["PADTRACE_LAB_REAL_INDEXER"] = "1"
        environment["SGLANG_DISABLE_DSA_INDEXER_FUSION"] = "1"  # the fused kernel has no stand-in
    if fix_30642:
        environment["PADTRACE_LAB_FIX_30642"] = "1"
    return environment


def lab_server_arguments(
    model: LabModel, *, port: int, tp: int, extra: Sequence[str] = ()
) -> list[str]:
    """Arguments for `python -m sglang.launch_server`: a tiny model with dummy weights on a CPU.

    `extra` comes last and therefore wins where it repeats an option. Raises UsageError for a model
    the lab does not have.
    """
    folder, arguments = _MODEL_ARGUMENTS[lab_model(model)]
    return [
        f"--model-path={MODELS / folder}",
        *arguments,
        *_COMMON_ARGUMENTS,
        f"--port={port}",
        f"--tp={tp}",
        *extra,
    ]


@dataclass(frozen=True)
class LabSetup:
    """Everything a lab server is started with; `dp` above 1 means DP attention.

    Args:
        root: folder of the SGLang to serve with; None for that of the interpreter.
    """

    model: str
    root: Path | None
    tp: int
    dp: int
    port: int
    extra: Sequence[str] = ()
    real_indexer: bool = True
    fix_30642: bool = False

    def arguments(self) -> list[str]:
        """Arguments for `python -m sglang.launch_server`."""
        attention = [f"--dp={self.dp}", "--enable-dp-attention"] if self.dp > 1 else []
        return lab_server_arguments(
            lab_model(self.model), port=self.port, tp=self.tp, extra=[*attention, *self.extra]
        )

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Environment of the server, on top of `base`."""
        return lab_environment(
            base,
            sglang_root=self.root,
            ranks=self.tp,
            real_indexer=self.real_indexer,
            fix_30642=self.fix_30642,
        )


def lab_model(name: str) -> LabModel:
    """The model of this name; UsageError if the lab has none."""
    if name in get_args(LabModel):
        return cast(LabModel, name)
    raise UsageError(
        f"the lab has no model {name!r}",
        "It brings two tiny configurations and no weights.",
        f"Use one of: {', '.join(get_args(LabModel))}.",
    )


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago, with those that SGLang derives from it.

    Below the range that outgoing connections take theirs from, so that none of them takes one
    before the server does.
    """
    for _ in range(_PORT_TRIES):
        port = random.randrange(*_PORTS)
        if all(_can_be_bound(port + offset) for offset in _PORT_OFFSETS):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _python_root(sglang_root: Path) -> Path:
    for root in (sglang_root, sglang_root / "python"):
        if (root / "sglang" / "srt").is_dir():
            return root.resolve()
    raise EnvironmentMissingError(
        f"no SGLang in {sglang_root}",
        "Neither sglang/srt nor python/sglang/srt is there.",
        "Give the folder of an unpacked wheel or of a checkout.",
    )
