"""Hooks on a made-up SGLang: what is there is hooked at the right time, what is not is reported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from padtrace.record.install import Installer, wrap_attribute
from padtrace.record.targets import source_look
from tests.record.standins import Recorder, Tensor, decode_batch, never

_MODULES = {
    "sglang": "",
    "sglang.srt": "",
    "sglang.srt.model_executor": "",
    "sglang.srt.layers": "",
    "sglang.srt.layers.attention": "",
    "sglang.srt.model_executor.model_runner": """
class ModelRunner:
    is_draft_worker = False
    def __init__(self, backend):
        self.backend = backend
    def init_attention_backends(self):
        self.attn_backend = self.backend
    def forward(self, forward_batch, skip_attn_backend_init=False):
        self.attn_backend.init_forward_metadata(forward_batch)
        return "output"
""",
    "sglang.srt.layers.attention.made_up_backend": """
class AttentionBackend:
    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        pass
class MadeUpBackend(AttentionBackend):
    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        pass
class Wrapping(AttentionBackend):
    def __init__(self, inner):
        self.prefill_backend = inner
    def init_forward_metadata(self, forward_batch):
        self.prefill_backend.init_forward_metadata(forward_batch)
""",
}


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "release"
    for name, text in _MODULES.items():
        path = root.joinpath(*name.split("."))
        package = not text
        file = path / "__init__.py" if package else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    hidden = {n: m for n, m in sys.modules.items() if n == "sglang" or n.startswith("sglang.")}
    for name in hidden:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(root))
    yield root
    for name in [n for n in sys.modules if n == "sglang" or n.startswith("sglang.")]:
        del sys.modules[name]
    sys.modules.update(hidden)


def install(recorder: Recorder, root: Path, register: Any = None) -> Installer:
    def refuse(dotted: str, hooked: Any) -> None:
        raise AssertionError(f"{dotted} is not imported yet")

    installer = Installer(recorder.context, None, source_look(root), register or refuse, never)
    installer.install()
    return installer


def test_hooks_wait_for_the_import_and_backends_for_their_making(
    sglang: Path, tmp_path: Path
) -> None:
    recorder = Recorder(tmp_path / "rings")
    installer = install(recorder, sglang)
    runners = importlib.import_module("sglang.srt.model_executor.model_runner")
    backends = importlib.import_module("sglang.srt.layers.attention.made_up_backend")
    backend = backends.MadeUpBackend()
    runner = runners.ModelRunner(backends.Wrapping(backend))
    runner.init_attention_backends()
    assert runner.forward(decode_batch(3)) == "output"
    installer._watch.stop()
    plans = recorder.events("plan")
    # super() and the graph method of the same object are part of its own plan.
    assert [plan["backend"] for plan in plans] == ["Wrapping", "MadeUpBackend"]
    assert {plan["forward"] for plan in plans} == {0}
    coverage = recorder.recording().coverage["hooks"]
    assert coverage["forward"]["status"] == "found"
    assert coverage["MadeUpBackend.init_forward_metadata"]["fired"] == {"0": 1}
    assert coverage["dsa.init_forward_metadata"]["status"] == "absent"
    assert coverage["dsa.init_forward_metadata"]["note"]
    facts = recorder.recording().facts[0]
    assert "sglang.srt.model_executor.model_runner.ModelRunner.forward" in facts["fingerprints"]
    assert facts["workers"]["target"]["backend"] == "Wrapping"


def test_what_is_imported_already_goes_to_sglangs_registry(sglang: Path, tmp_path: Path) -> None:
    importlib.import_module("sglang.srt.model_executor.model_runner")
    registered: dict[str, Any] = {}
    installer = install(Recorder(tmp_path / "rings"), sglang, registered.__setitem__)
    installer._watch.stop()
    name = "sglang.srt.model_executor.model_runner.ModelRunner."
    assert set(registered) == {name + "forward", name + "init_attention_backends"}
    assert registered[name + "forward"](lambda runner, batch: 7, object, decode_batch()) == 7


def test_a_function_gone_at_import_is_lost_and_not_a_traceback(
    sglang: Path, tmp_path: Path
) -> None:
    file = sglang / "sglang/srt/model_executor/model_runner.py"
    file.write_text(file.read_text() + "\ndel ModelRunner.forward\n")
    recorder = Recorder(tmp_path / "rings")
    installer = install(recorder, sglang)
    importlib.import_module("sglang.srt.model_executor.model_runner")
    installer._watch.stop()
    assert recorder.recording().coverage["hooks"]["forward"]["status"] == "lost"


def test_class_and_static_methods_stay_what_they_are() -> None:
    class Owner:
        @classmethod
        def make(cls, x: int) -> tuple[type, int]:
            return cls, x

        @staticmethod
        def pad(x: int) -> int:
            return x

        def method(self, x: int) -> int:
            return x

    def plus_one(original: Any, *args: Any) -> Any:
        return original(*args[:-1], args[-1] + 1)

    for name in ("make", "pad", "method"):
        wrap_attribute(Owner, name, plus_one)
    assert Owner.make(1) == (Owner, 2)
    assert Owner.pad(1) == Owner().pad(1) == 2
    assert Owner().method(1) == 2
    assert Owner.method.__wrapped__.__name__ == "method"  # type: ignore[attr-defined]
    assert Tensor(3).shape == (3,)
