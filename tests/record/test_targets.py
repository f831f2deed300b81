"""The table of targets: looked for in source, under either name, absent without a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from padtrace.record.targets import TARGETS, choose, doctor_rows, live_look, resolve, source_look


def write(root: Path, module: str, text: str) -> None:
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_found_moved_and_absent_in_an_unpacked_release(tmp_path: Path) -> None:
    write(
        tmp_path,
        "sglang.srt.model_executor.forward_batch_info",
        "class Other:\n    def init_new(cls): ...\n\n"
        "class ForwardBatch:\n    x: int = 0\n\n    @classmethod\n    def init_new(cls): ...\n"
        "    def prepare_mlp_sync_batch(\n        self,\n    ): ...\n\n"
        "def _pad_inputs_to_size(self): ...\n",
    )
    write(
        tmp_path,
        "sglang.srt.managers.scheduler_dp_attn_mixin",
        "def prepare_mlp_sync_batch_raw(\n    local_batch,\n): ...\n",
    )
    rows = {row.hook: row for row in doctor_rows(source_look(tmp_path))}
    assert len(rows) == len(TARGETS)
    assert rows["init_new"].status == "found"
    assert rows["prepare_mlp_sync_batch"].status == "found"
    # A function of that name outside the class is no method of it.
    assert rows["_pad_inputs_to_size"].status == "absent"
    assert rows["prepare_mlp_sync_batch_raw"].status == "moved"
    assert rows["prepare_mlp_sync_batch_raw"].target == (
        "sglang.srt.managers.scheduler_dp_attn_mixin.prepare_mlp_sync_batch_raw"
    )
    absent = rows["dsa.init_forward_metadata"]
    assert (absent.status, absent.target) == ("absent", "")
    assert absent.cost


def test_names_are_unique_and_every_absence_has_a_cost() -> None:
    names = [target.hook for target in TARGETS]
    assert len(set(names)) == len(names)
    assert all(target.cost and target.candidates for target in TARGETS)


def test_an_imported_module_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("padtrace_fake_module")
    module.Thing = type("Thing", (), {"method": lambda self: None})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "padtrace_fake_module", module)
    assert live_look("padtrace_fake_module", "Thing.method")
    assert not live_look("padtrace_fake_module", "Thing.gone")
    assert resolve(module, "Thing.method") is module.Thing.method


def test_looking_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "padtrace_unimported"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "kernels.py").write_text("def launch(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert live_look("padtrace_unimported.kernels", "launch")
    assert not live_look("padtrace_unimported.kernels", "other")
    assert not live_look("padtrace_unimported.gone", "launch")
    assert not live_look("padtrace_nowhere.kernels", "launch")
    assert "padtrace_unimported" not in sys.modules


def test_the_newest_home_wins_where_both_are_there() -> None:
    target = next(t for t in TARGETS if t.hook == "flash_mla_with_kvcache")
    assert choose(target, lambda module, attribute: True) == ("found", target.candidates[0])
