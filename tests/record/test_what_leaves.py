"""What a server's process writes and what is sealed of it: no secret, no name of a machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from padtrace.record import ring_file, wire
from padtrace.record.facts_collector import runner_facts
from padtrace.record.failures import frames_of, message_of
from padtrace.record.ring import EventWriter
from padtrace.record.seal import seal
from padtrace.recording.writer import to_bytes
from padtrace.sharing.check import share_check
from padtrace.sharing.rule import node_label
from tests.record.made_events import MadeRank, rank_facts
from tests.sharing.shapes import SECRETS, SURROUNDINGS, Secret


def model_runner(text: str) -> SimpleNamespace:
    """One whose every string is `text`, its arguments under many names."""
    names = (
        "model_path", "speculative_draft_model_path", "served_model_name", "host", "api_key",
        "attention_backend", "kv_cache_dtype", "device", "speculative_algorithm", "tool_server",
    )  # fmt: skip
    hf_config = SimpleNamespace(model_type=text, architectures=[text])
    return SimpleNamespace(
        is_draft_worker=False,
        device=text,
        kv_cache_dtype=text,
        server_args=SimpleNamespace(
            **dict.fromkeys(names, text), lora_paths=[text], nested={text: text}, tp_size=2
        ),
        model_config=SimpleNamespace(hf_config=hf_config, attention_arch=text),
    )


def rank(folder: Path, tp_rank: int, text: str) -> EventWriter:
    """A rank that met the secret wherever a text can come from."""
    writer = EventWriter.create(folder, size_bytes=1 << 20, run="one")
    writer.facts(runner_facts(model_runner(text)))
    writer.facts(rank_facts(tp_rank=tp_rank, tp_size=4, environment={"SGLANG_USE_AITER": text}))
    # Where a hash is due nothing tells it from a key.
    due = set(text) <= set("0123456789abcdef")
    writer.facts({"fingerprints": {text: "" if due else text}, text: text})
    error: Exception = type("HorseError", (Exception,), {})(text)
    event = {"enter_seq": 1, "t_ns": 5, "type": "HorseError", "message": message_of(error)}
    event["frames"] = frames_of(error.__traceback__)
    writer.write(wire.kind_index("error"), *MadeRank(writer).numbers("error", event))
    writer.close()
    return writer


@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret.text[:24])
def test_no_secret_is_in_a_ring_nor_in_what_is_sealed(secret: Secret, tmp_path: Path) -> None:
    for number, surrounding in enumerate(SURROUNDINGS):
        writer = rank(tmp_path, number, surrounding.format(secret.text))
        assert secret.core.encode() not in writer.path.read_bytes()
    sealed = seal([tmp_path])
    assert sealed.recording.rows("error") == len(SURROUNDINGS)
    assert secret.core.encode() not in to_bytes(sealed.recording)
    assert share_check(sealed.recording).holds


def test_what_an_older_recorder_left_in_a_ring_goes_when_it_is_sealed(tmp_path: Path) -> None:
    """Rings outlive an upgrade: their strings, hooks and facts are brought to the list too."""
    for number, secret in enumerate(SECRETS):
        writer = EventWriter.create(tmp_path, size_bytes=256 << 10, run="one")
        writer.facts(rank_facts(tp_rank=number, tp_size=len(SECRETS) * 2))
        made = MadeRank(writer)
        event = {"enter_seq": 1, "t_ns": 5, "type": secret.text, "message": secret.text}
        writer.write(wire.kind_index("error"), *made.numbers("error", event))
        hook = writer.hook("pad", "found", secret.text, secret.text)
        writer.lost(hook, writer.string(secret.text))
        writer.close()
    sealed = seal([tmp_path], about={"command": SECRETS[0].text, "more": SECRETS[1].text})
    data = to_bytes(sealed.recording)
    told = json.dumps(sealed.notes, ensure_ascii=False)
    for secret in SECRETS:
        assert secret.core.encode() not in data, secret.text
        assert secret.core not in told
    assert share_check(sealed.recording).holds


def test_no_recording_names_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, host in enumerate(("stables-7", "stables-8")):
        monkeypatch.setattr(ring_file.socket, "gethostname", lambda host=host: f"{host}.example")
        writer = EventWriter.create(tmp_path, size_bytes=256 << 10)
        writer.facts(rank_facts(tp_rank=number, tp_size=2, dp_size=1))
        writer.close()
        assert host in writer.path.name
    damaged = tmp_path / "stables-9.12.0abc1234.ring"
    damaged.write_bytes(b"x" * 64)
    sealed = seal([tmp_path])
    assert b"stables" not in to_bytes(sealed.recording)
    label = node_label("stables-8", ring_file.boot_id())
    # No run was named, so the machine and its session are its name.
    assert sealed.recording.about["run"].startswith(f"{label}-")
    assert any("node.12.0abc1234.ring" in note for note in sealed.notes)
    assert share_check(sealed.recording).holds
