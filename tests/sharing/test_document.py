"""`padtrace redact` and `--share-check` on whole files: secrets planted in every place of one."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from padtrace.contracts.engine import check
from padtrace.errors import BadRecordingError
from padtrace.recording import reader, writer
from padtrace.recording.absent import NOT_RECORDED
from padtrace.recording.model import Recording
from padtrace.recording.value_tensors import ValueKey, ValueTensor
from padtrace.sharing import kept
from padtrace.sharing.check import masked, share_check, share_check_file
from padtrace.sharing.document import differences, redacted
from padtrace.sharing.document import kept as kept_document
from tests.contracts.builders import Server, agreeing, batch
from tests.sharing.shapes import HARMLESS, SECRETS, SURROUNDINGS, Secret

FOLDER = Path(__file__).resolve().parent.parent.parent / "recordings"
SHIPPED = sorted(FOLDER.glob("*.safetensors"))
PLACES = (
    "facts.*.server_args.model_path",
    "facts.*.environment.SGLANG_ENABLE_CP_V2",
    "facts.*.workers.target.backend",
    "about.notes.*",
    "about.command",
    "coverage.hooks.pad.note",
    "strings.*",
)


def recording() -> Recording:
    """A small one with an error, a hook and two notes."""
    server = Server(source="server")
    server.pad(batch("DECODE", 1, 1), batch("DECODE", 2, 2))
    server.add("error", type="RuntimeError", message="num_splits must have shape (b+1)")
    made = server.finish({"hooks": {"pad": {"status": "found", "note": "the pad itself"}}})
    made.about["notes"] = ["rank 3 ended suddenly"]
    return made


def planted(text: str) -> Recording:
    """`text` in every place where a string can remain."""
    made = recording()
    made.facts[0]["server_args"] = {"model_path": text}
    made.facts[0]["environment"] = {"SGLANG_ENABLE_CP_V2": text}
    made.facts[0]["workers"] = {"target": {"backend": text}}
    made.about["notes"] = [text]
    made.about["command"] = text
    made.coverage["hooks"]["pad"]["note"] = text
    message = made.strings.index("num_splits must have shape (b+1)")
    made.strings[message] = text
    return made


def signature(made: Recording) -> list[Any]:
    """What `check` finds, without the words."""
    report = check(made)
    return [
        report.verdict,
        sorted((f.contract, f.process, f.step, str(f.left), str(f.right)) for f in report.findings),
    ]


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret.text[:24])
def test_a_planted_secret_is_found_everywhere_and_taken_out(
    secret: Secret, surrounding: str
) -> None:
    made = planted(surrounding.format(secret.text))
    proof = share_check(made)
    assert not proof.holds
    assert {one.place for one in proof.suspicions} == set(PLACES)
    assert secret.core not in json.dumps(proof.as_json(), ensure_ascii=False)
    copy = redacted(made).recording
    assert secret.core.encode() not in writer.to_bytes(copy)
    assert share_check(copy).holds


def test_what_only_looks_like_a_secret_does_not_fail() -> None:
    made = recording()
    made.about["notes"] = [f"rank 3 saw {text}" for text in HARMLESS]
    assert share_check(made).holds
    assert redacted(made).recording.about["notes"] == made.about["notes"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recording_can_be_shared_and_a_copy_says_the_same(path: Path) -> None:
    before = reader.read(path)
    assert share_check_file(before, path).holds
    copy = reader.from_bytes(writer.to_bytes(redacted(before).recording), path.name)
    assert signature(copy) == signature(before)
    for name in before.tables:
        assert copy.rows(name) == before.rows(name)


def test_an_older_file_is_told_what_it_holds_more() -> None:
    made = recording()
    made.facts[0]["host"] = "stables"
    made.facts[0]["server_args"] = {"tp_size": 2, "served_model_name": "horse", "nested": {"a": 1}}
    made.facts[0]["environment"] = {"SGLANG_X": "0|1"}
    made.about["notes"] = ["the clock of stables was set", "bad ring: stables.12.0abc.ring"]
    made.about["run"] = "stables-12.345"
    proof = share_check(made)
    assert not proof.holds
    assert proof.list_version is None
    assert proof.holds_more == {
        "environment variables": 1,
        "names of machines": 1,
        "server arguments": 2,
    }
    copy = redacted(made)
    assert copy.recording.facts[0]["server_args"] == {
        "tp_size": 2,
        "served_model_name": NOT_RECORDED,
        "nested": NOT_RECORDED,
    }
    assert copy.recording.facts[0]["host"] == "node-0"
    assert copy.recording.about["run"] == "node-0-12.345"
    assert b"stables" not in writer.to_bytes(copy.recording)
    assert share_check(copy.recording).holds


def test_values_of_tensors_do_not_come_along() -> None:
    made = agreeing()
    made.about["tier"] = "meta"
    made.facts[0]["recorder"] = {"tier": "meta", "list": kept.LIST_VERSION}
    made.values[ValueKey(0, 1, "seq_lens")] = ValueTensor(np.array([3], np.int32), "int32")
    assert not share_check(made).holds
    copy = redacted(made)
    assert copy.taken["values of tensors"] == 1
    assert copy.recording.values == {}
    assert copy.recording.about["tier"] == "shape"
    assert copy.recording.facts[0]["recorder"]["tier"] == "shape"
    assert share_check(copy.recording).holds
    assert made.values, "the original is left as it was"


def test_a_string_that_no_table_holds_fails_without_any_shape() -> None:
    for text in ("tell me about my horse", "x" * 5000, "two\nlines", "\x1b[31mred"):
        made = recording()
        made.strings.append(text)
        proof = share_check(made)
        assert proof.holds_more == {"strings": 1}
        assert not proof.holds


def test_names_are_looked_at_like_values() -> None:
    made = recording()
    made.coverage["hooks"]["hf_AbCdEfGhIjKlMnOp"] = {"note": ""}
    made.facts[0]["environment"] = {"SGLANG_sk-proj-9aB8cD7eF6gH5iJ4": "1"}
    proof = share_check(made)
    assert len(proof.suspicions) == 2
    assert "AbCdEf" not in json.dumps(proof.as_json())
    assert b"AbCdEf" not in writer.to_bytes(redacted(made).recording)


def _with_metadata(made: Recording, **entries: str) -> bytes:
    """The file with further entries, its digest right, as a careful stranger would make it."""
    data = writer.to_bytes(made)
    size = int.from_bytes(data[:8], "little")
    texts = msgspec.json.decode(data[8 : 8 + size])["__metadata__"] | entries
    texts["metadata_digest"] = writer.metadata_digest(texts)
    return save(load(data), metadata=texts)


def test_an_entry_that_nobody_reads_is_looked_at() -> None:
    data = _with_metadata(recording(), comment="pass=hunter2horse")
    proof = share_check(reader.from_bytes(data, "x"), data)
    assert [one.place for one in proof.suspicions] == ["comment"]
    assert any("does not write" in problem for problem in proof.problems)


def test_a_meaning_that_was_changed_is_looked_at() -> None:
    data = writer.to_bytes(recording())
    size = int.from_bytes(data[:8], "little")
    tables = msgspec.json.decode(msgspec.json.decode(data[8 : 8 + size])["__metadata__"]["tables"])
    tables["pad"]["meaning"] = "mail horseuser@stables.example"
    data = _with_metadata(recording(), tables=msgspec.json.encode(tables).decode())
    proof = share_check(reader.from_bytes(data, "x"), data)
    assert [one.place for one in proof.suspicions] == ["tables.pad.meaning"]


def test_a_name_that_stands_twice_is_told() -> None:
    hidden = '{"source": "server", "tier": "shape", "notes": [], "notes": ["x"]}'
    data = _with_metadata(recording(), about=hidden)
    proof = share_check(reader.from_bytes(data, "x"), data)
    assert any("stands twice at about" in problem for problem in proof.problems)


def test_a_tensor_of_no_table_is_told() -> None:
    data = writer.to_bytes(recording())
    size = int.from_bytes(data[:8], "little")
    texts = msgspec.json.decode(data[8 : 8 + size])["__metadata__"]
    tensors = {**load(data), "letters": np.array([104, 111], np.int8)}
    digests = {name: writer.digest(tensor.tobytes()) for name, tensor in tensors.items()}
    texts["digests"] = msgspec.json.encode(digests).decode()
    texts["metadata_digest"] = writer.metadata_digest(texts)
    data = save(tensors, metadata=texts)
    proof = share_check(reader.from_bytes(data, "x"), data)
    assert any("belong to no table" in problem for problem in proof.problems)


def test_a_file_that_went_away_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(BadRecordingError):
        share_check_file(recording(), tmp_path / "gone.safetensors")


@pytest.mark.parametrize("text", ["", "a", "hunter2", "hunter2horse", "\x1b[31mhorse\n", "é" * 99])
def test_a_mask_shows_two_characters_at_most(text: str) -> None:
    shown = masked(text)
    assert shown.isprintable()
    mask = shown.rpartition(" (")[0]
    assert len(mask) <= 3
    assert not any(text[i : i + 2] in mask for i in range(len(text) - 1))


_TEXT = st.text(max_size=40) | st.sampled_from([secret.text for secret in SECRETS])


@given(
    st.dictionaries(st.text(max_size=12), _TEXT, max_size=3),
    st.lists(_TEXT, max_size=3),
    st.lists(_TEXT, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_a_copy_of_any_file_can_be_shared(
    arguments: dict[str, str], notes: list[str], strings: list[str]
) -> None:
    made = recording()
    made.facts[0]["server_args"] = arguments
    made.about["notes"] = notes
    made.coverage["more"] = {"by name": arguments, "list": notes}
    made.strings += strings
    copy = redacted(made).recording
    assert share_check(copy).holds
    assert list(differences(copy, kept_document(copy))) == []


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "padtrace", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_commands(tmp_path: Path) -> None:
    source, out = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    writer.write(planted("pass=hunter2horse"), source)
    told = run("info", source, "--share-check")
    assert told.returncode == 1
    assert "made by an older padtrace that held more" in told.stdout
    assert f"next: padtrace redact {source} -o OUT" in told.stdout
    assert "hunter2horse" not in told.stdout
    made = run("redact", source, "-o", out)
    assert made.returncode == 0, made.stderr
    assert "taken out" in made.stdout
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert b"hunter2horse" not in out.read_bytes()
    assert run("info", out, "--share-check").returncode == 0
    refused = run("redact", source, "-o", out)
    assert refused.returncode == 2
    assert "does not overwrite" in refused.stderr
    again = run("redact", source, "-o", out, "--force", "--json")
    assert (again.returncode, json.loads(again.stdout)["holds"]) == (0, True)
