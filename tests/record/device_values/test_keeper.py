"""What is kept of which event, with real tensors on the CPU and the real probes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padtrace.record.device_values import layout
from padtrace.record.device_values.values_file import ValuesFile
from padtrace.record.hooks import Hook
from padtrace.record.targets import source_look
from padtrace.recording import reader
from padtrace.recording.model import Recording
from padtrace.recording.value_tensors import FULL_FIELDS, META_FIELDS, ValueKey
from padtrace.recording.writer import to_bytes
from padtrace.sharing.check import share_check
from tests.record.standins import ModelRunner, Recorder, decode_batch, never

torch = pytest.importorskip("torch", reason="torch is not installed here")
SIZE = 1 << 20


@dataclass
class Kept:
    """A recorder whose probes keep values."""

    recorder: Recorder
    installer: Any
    keeper: Any

    def probe(self, kind: str, function: str) -> Any:
        return self.installer._probe(kind, function)

    def recording(self) -> Recording:
        """Sealed, written and read again."""
        return reader.from_bytes(to_bytes(self.recorder.recording()), "sealed")

    def values(self) -> dict[str, list[int]]:
        return {k.field: v.data.tolist() for k, v in self.recording().values.items()}


def keeping(folder: Path, tier: str) -> Kept:
    from padtrace.record.device_values.keeper import Keeper
    from padtrace.record.device_values.probes import KeepingInstaller

    recorder = Recorder(folder)
    recorder.writer.facts({"recorder": {"tier": tier}})
    file = ValuesFile.create(recorder.writer.path.with_suffix(layout.SUFFIX), SIZE)
    keeper = Keeper(file, tier)
    look = source_look(folder)
    rest = (recorder.context, None, look, lambda *args: None, never)
    return Kept(recorder, KeepingInstaller(keeper, *rest), keeper)


def long(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int64)


def test_a_pad_keeps_the_batch_before_and_after(tmp_path: Path) -> None:
    kept = keeping(tmp_path, "meta")
    batch = decode_batch(3)
    batch.seq_lens, batch.positions = long(5, 6, 7), long(4, 5, 6)
    batch.input_ids = long(101, 102, 103)

    def pad(batch: Any, runner: Any) -> None:
        batch.seq_lens = torch.cat([batch.seq_lens, long(1)])
        batch.positions.add_(1)

    probe = kept.probe("pad", "prepare_mlp_sync_batch")
    kept.recorder.hook(probe, pad)(batch, ModelRunner())
    assert kept.values() == {
        "entry.seq_lens": [5, 6, 7],
        "entry.positions": [4, 5, 6],
        "exit.seq_lens": [5, 6, 7, 1],
        "exit.positions": [5, 6, 7],
    }
    # Token ids are of no tier.
    assert b"\x65\0\0\0\0\0\0\0\x66" not in kept.keeper._file.path.read_bytes()


def test_a_plan_keeps_its_tables_and_num_splits(tmp_path: Path) -> None:
    kept = keeping(tmp_path, "meta")
    inner = SimpleNamespace(num_splits=torch.tensor([0, 1, 2], dtype=torch.int32))
    metadata = SimpleNamespace(
        cache_seqlens_int32=torch.tensor([5, 6], dtype=torch.int32),
        page_table_1=torch.tensor([[7, 8], [9, -1]], dtype=torch.int32),
        flashmla_metadata=SimpleNamespace(flashmla_metadata=inner),
    )
    backend = SimpleNamespace(forward_metadata=metadata)
    probe = kept.probe("plan", "init_forward_metadata")
    kept.recorder.hook(probe, lambda *args: None)(backend, decode_batch(2))
    assert kept.values() == {
        "cache_seqlens_int32": [5, 6],
        "page_table_1": [[7, 8], [9, -1]],
        "num_splits": [0, 1, 2],
    }
    (event,) = kept.recorder.events("plan")
    assert {key.enter_seq for key in kept.recording().values} == {event["enter_seq"]}


def launch(kept: Kept, **more: Any) -> Any:
    """Two equal calls of the kernel, on a cache of 4 pages of 2 tokens of 3 bytes."""
    probe = kept.probe("launch", "flash_mla_with_kvcache")
    hook = Hook(kept.recorder.state, "launch", kept.recorder.writer.hook("launch", "found"))
    hooked = probe.around(hook, never)
    cache = torch.arange(24, dtype=torch.uint8).reshape(4, 2, 1, 3)
    given = {
        "q": torch.tensor([[[[1.0, -2.0]]]], dtype=torch.bfloat16),
        "k_cache": cache.view(torch.float8_e4m3fn),
        "cache_seqlens": torch.tensor([3], dtype=torch.int32),
        "num_splits": torch.tensor([0, 1], dtype=torch.int32),
        **more,
    }
    assert [hooked(lambda **_: "out", **given) for _ in range(2)] == ["out", "out"]


def test_meta_keeps_no_activations_of_a_launch(tmp_path: Path) -> None:
    kept = keeping(tmp_path, "meta")
    launch(kept, indices=torch.tensor([[[0, 5]]], dtype=torch.int32))
    assert kept.values() == {"cache_seqlens": [3], "num_splits": [0, 1]}
    proof = share_check(kept.recording())
    assert not proof.holds  # it is no `shape` file
    assert [p for p in proof.problems if "only tier" in p] == []


def test_full_keeps_q_and_the_kv_rows_it_reads(tmp_path: Path) -> None:
    kept = keeping(tmp_path, "full")
    launch(kept, indices=torch.tensor([[[0, 5, -1]]], dtype=torch.int32))
    values = kept.values()
    # bfloat16 bits: 1.0 is 0x3f80, -2.0 is 0xc000.
    assert values["q"] == [[[[0x3F80, 0xC000 - 0x10000]]]]
    assert values["indices"] == [[[0, 5, -1]]]
    # Rows 0, 5 and, for the absent one, 0: three bytes each.
    assert values["kv_rows"] == [[0, 1, 2], [15, 16, 17], [0, 1, 2]]
    dtypes = {key.field: value.dtype for key, value in kept.recording().values.items()}
    assert (dtypes["q"], dtypes["indices"], dtypes["kv_rows"]) == ("bfloat16", "int32", "uint8")


def test_full_keeps_the_pages_of_a_dense_launch(tmp_path: Path) -> None:
    kept = keeping(tmp_path, "full")
    launch(kept, block_table=torch.tensor([[3, 1]], dtype=torch.int32))
    assert kept.values()["kv_pages"] == [[18, 19, 20, 21, 22, 23], [6, 7, 8, 9, 10, 11]]


def test_what_a_tier_forbids_is_named(tmp_path: Path) -> None:
    kept = keeping(tmp_path, "full")
    launch(kept, indices=torch.tensor([[[0]]], dtype=torch.int32))
    recording = kept.recording()
    recording.about["tier"] = "meta"
    named = [p for p in share_check(recording).problems if "only tier full" in p]
    assert [p.split()[4] for p in named] == ["indices,", "kv_rows,", "q,"]
    recording.about["tier"] = "shape"
    assert len([p for p in share_check(recording).problems if "only tier" in p]) == 5
    lines = share_check(recording).lines
    assert any("q (activations or KV) 1" in line for line in lines)


def test_a_failure_switches_it_off_and_the_probe_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keeping(tmp_path, "meta")

    def broken(*args: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(ValuesFile, "put", broken)
    batch = decode_batch(2)
    batch.seq_lens, batch.positions = long(1, 2), None
    hooked = kept.recorder.hook(kept.probe("pad", "p"), lambda *args: "padded")
    with caplog.at_level(logging.WARNING):
        assert [hooked(batch, ModelRunner()) for _ in range(3)] == ["padded"] * 3
    said = [r.message for r in caplog.records if "padtrace" in r.message]
    assert said == ["padtrace: values are no longer kept: RuntimeError: device lost"]
    recording = kept.recording()
    assert recording.rows("pad") == 3
    assert recording.values == {}
    assert recording.coverage["blind"]["values"]["0"]["failed"] == 1


def test_what_is_too_large_is_counted(tmp_path: Path) -> None:
    kept = keeping(tmp_path, "meta")
    batch = decode_batch(2)
    batch.seq_lens, batch.positions = torch.zeros(SIZE // 8, dtype=torch.int64), None
    probe = kept.probe("init_new", "init_new")
    made = kept.recorder.hook(probe, lambda *args: batch)
    made(type(batch), SimpleNamespace(global_num_tokens=None), ModelRunner())
    recording = kept.recording()
    assert recording.coverage["blind"]["values"]["0"] == {
        "kept": 0, "dropped": 1, "overwritten": 0, "failed": 0,
    }  # fmt: skip
    assert recording.values == {}


def test_the_keys_are_those_of_the_format() -> None:
    from padtrace.record.device_values import keeper

    taken = {*keeper.BATCH_FIELDS, *keeper.PLAN_FIELDS, *keeper.LAUNCH_FIELDS, "num_splits"}
    assert taken == set(META_FIELDS)
    assert not taken & set(FULL_FIELDS)
    assert ValueKey(3, 12, "exit.q").name == "values/3/12/exit.q"
