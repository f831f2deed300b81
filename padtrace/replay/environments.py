"""Which interpreter a replay runs in: one that can import SGLang on a CPU.

SGLang's wheels are built for one Python version each, and what they import is large. The current
interpreter serves where everything is importable; otherwise padtrace makes an environment of its
own in its cache, once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from padtrace import children
from padtrace.errors import EnvironmentMissingError
from padtrace.replay.places import cache_folder

PYTHON_VARIABLE = "PADTRACE_REPLAY_PYTHON"
TORCH_INDEX_VARIABLE = "PADTRACE_TORCH_INDEX"
Say = Callable[[str], None]

# Found by running imports of seven releases on a CPU; one environment serves them all.
TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"
PACKAGES = (
    "transformers==5.12.1",
    *("IPython", "aiohttp", "compressed_tensors", "dill", "einops", "gguf", "msgspec", "numpy"),
    *("openai", "orjson", "packaging", "partial_json_parser", "pillow", "psutil", "pybase64"),
    *("pydantic", "pyzmq", "requests", "safetensors", "sentencepiece", "starlette", "tqdm"),
    *("triton", "xgrammar"),
)
# Names under which the packages above are imported; looked for, never imported, here.
_IMPORTED = (
    *("torch", "torchvision", "transformers", "IPython", "aiohttp", "compressed_tensors", "dill"),
    *("einops", "gguf", "openai", "orjson", "packaging", "partial_json_parser", "PIL", "psutil"),
    *("pybase64", "pydantic", "zmq", "requests", "sentencepiece", "starlette", "tqdm", "triton"),
    *("xgrammar", "msgspec", "numpy", "safetensors"),
)
_COMPLETE = "complete"


def replay_interpreter(say: Say) -> Path:
    """The interpreter of the worker, its environment made if need be (minutes, about 2 GB).

    Raises:
        EnvironmentMissingError: the stated interpreter is none, or pip could not install.
    """
    stated = os.environ.get(PYTHON_VARIABLE)
    if stated:
        return _stated(stated)
    if not missing_packages():
        return Path(sys.executable)
    environment = _folder()
    python = environment / "bin" / "python"
    if not (environment / _COMPLETE).exists():
        _make(environment, python, say)
    return python


def interpreter_for_wheels() -> Path:
    """The interpreter whose wheels are fetched: that of the replay, without making anything."""
    stated = os.environ.get(PYTHON_VARIABLE)
    return _stated(stated) if stated else Path(sys.executable)


def missing_packages() -> list[str]:
    """What the current interpreter lacks to import SGLang on a CPU."""
    return [name for name in _IMPORTED if importlib.util.find_spec(name) is None]


def remove() -> None:
    """Remove the environment that padtrace made, if it made one."""
    shutil.rmtree(_folder(), ignore_errors=True)


def _stated(text: str) -> Path:
    found = shutil.which(os.path.expanduser(text))
    if found is None:
        raise EnvironmentMissingError(
            f"{PYTHON_VARIABLE}={text} is no interpreter",
            "there is no such program, or it may not be run",
            f"set it to a python that imports torch and transformers, or unset {PYTHON_VARIABLE}",
        )
    # Of the folder the command was given in; the process runs in another.
    return Path(found).absolute()


def _folder() -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder() / "environments" / version


def _make(environment: Path, python: Path, say: Say) -> None:
    if sys.platform != "linux":
        raise EnvironmentMissingError(
            "SGLang cannot be imported here",
            f"its wheels are built for Linux; this is {sys.platform}",
            "replay on Linux; every other command works here",
        )
    say(f"making an environment for SGLang in {environment} (once; about 2 GB, some minutes)")
    shutil.rmtree(environment, ignore_errors=True)
    environment.parent.mkdir(parents=True, exist_ok=True)
    _run(children.python_command(sys.executable, "-m", "venv", str(environment)), "python -m venv")
    pip = children.python_command(python, "-m", "pip", "install", "--quiet")
    pip.append("--disable-pip-version-check")
    # An index of CPU builds spares the gigabytes of a CUDA torch; without one, any build serves.
    index = os.environ.get(TORCH_INDEX_VARIABLE)
    say(f"installing {TORCH}")
    _run([*pip, *(["--index-url", index] if index else []), TORCH], TORCH)
    say("installing what SGLang imports")
    _run([*pip, TORCH, *PACKAGES], "what SGLang imports")
    _run([*pip, "--no-deps", TORCHVISION], TORCHVISION)
    (environment / _COMPLETE).touch()


def _run(command: list[str], what: str) -> None:
    said: list[str] = []
    code = children.run(command, said.append, environment=children.python_environment(os.environ))
    if code:
        lines = [line for line in said if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise EnvironmentMissingError(
            f"the environment for SGLang could not be made: {what} failed",
            errors[-1].removeprefix("ERROR: ") if errors else f"exit code {code}",
            f"connect to the network and try again, or set {PYTHON_VARIABLE}",
        )
