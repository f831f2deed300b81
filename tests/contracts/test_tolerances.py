"""Every row of the table of tolerances, on both sides of each of its conditions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from padtrace.contracts import tolerances
from padtrace.contracts.engine import check
from padtrace.contracts.evidence import Evidence
from padtrace.contracts.tolerances import Tolerance
from padtrace.recording.absent import NOT_OBSERVED_CODE
from tests.contracts.builders import Server, batch

TABLE = tolerances.table()
OTHER = {"sign": {"shorter": "longer", "longer": "shorter"}}


def situation(entry: Tolerance) -> dict[str, Any]:
    """One in which every condition of the entry holds."""
    return {
        "backend": entry.backends[0] if entry.backends else "FlashInferAttnBackend",
        "sign": entry.sign or "longer",
        "mode": entry.modes[0] if entry.modes else "DECODE",
        "worker": entry.workers[0] if entry.workers else "target",
        "device": entry.devices[0] if entry.devices else "npu",
        "environment": {},
        "release": entry.last_release or entry.first_release or "0.5.18",
        "server_args": {},
    }


def declared(field: str, now: dict[str, Any]) -> bool:
    """Whether some row of the table declares the difference harmless in this situation."""
    facts: dict[str, Any] = {"server_args": now["server_args"]}
    server = Server(release=now["release"], device=now["device"], facts=facts)
    if now["backend"] is not None:
        server.add("plan", backend=now["backend"], worker=now["worker"])
    server.pad(batch(now["mode"], 3, 3), batch(now["mode"], 4, 4), worker=now["worker"])
    recording = server.finish()
    if now["environment"] is None:
        del recording.facts[0]["environment"]
    else:
        recording.facts[0]["environment"] = now["environment"]
    evidence = Evidence(recording)
    backend = NOT_OBSERVED_CODE if now["backend"] is None else evidence.text_id(now["backend"])
    found = tolerances.declared(
        evidence,
        field,
        process=np.array([0]),
        sign=np.array([-1 if now["sign"] == "shorter" else 1]),
        modes=np.array([evidence.text_id(now["mode"])]),
        workers=np.array([evidence.text_id(now["worker"])]),
        backends=np.array([backend]),
    )
    return bool(found[0] >= 0)


# Another value of each condition, and the value that says it is not known.
FLIPS: dict[str, tuple[str, list[Any]]] = {
    "backends": ("backend", ["FlashInferAttnBackend", None]),
    "devices": ("device", ["hip", "npu", None]),
    "modes": ("mode", ["SPLIT_PREFILL"]),
    "workers": ("worker", ["some other"]),
    "fused_topk": (
        "environment",
        [{"SGLANG_DSA_FUSE_TOPK": "0"}, {"SGLANG_NSA_FUSE_TOPK": "False"}, None],
    ),
    "last_release": ("release", ["0.5.99", "my-checkout", None]),
    "first_release": ("release", ["0.5.1", "my-checkout", None]),
}  # fmt: skip
FLIPPED = [
    (number, name, value)
    for number, entry in enumerate(TABLE)
    for name, (_, values) in FLIPS.items()
    if getattr(entry, name)
    for value in values
]


def label(number: int) -> str:
    return f"{number} {TABLE[number].field}"


@pytest.mark.parametrize("number", range(len(TABLE)), ids=label)
def test_it_holds_where_all_its_conditions_do(number: int) -> None:
    assert declared(TABLE[number].field, situation(TABLE[number]))


@pytest.mark.parametrize("number", range(len(TABLE)), ids=label)
def test_it_is_about_its_field_alone(number: int) -> None:
    assert not declared("another field", situation(TABLE[number]))


@pytest.mark.parametrize(("number", "name", "value"), FLIPPED)
def test_it_does_not_hold_where_one_condition_does_not_or_is_unknown(
    number: int, name: str, value: Any
) -> None:
    now = {**situation(TABLE[number]), FLIPS[name][0]: value}
    assert not declared(TABLE[number].field, now)


@pytest.mark.parametrize("number", [n for n, e in enumerate(TABLE) if e.sign], ids=label)
def test_it_does_not_hold_for_the_other_sign(number: int) -> None:
    entry = TABLE[number]
    assert entry.sign is not None
    now = {**situation(entry), "sign": OTHER["sign"][entry.sign]}
    assert not declared(entry.field, now)


def test_a_backend_that_no_plan_shows_is_the_one_of_its_worker() -> None:
    entry = next(e for e in TABLE if e.backends and not e.modes)
    for backend, harmless in ((entry.backends[0], True), ("FlashInferAttnBackend", False)):
        server = Server(facts={"workers": {"target": {"backend": backend}}})
        raw, padded = batch("TARGET_VERIFY", 18, 3, 6), batch("TARGET_VERIFY", 20, 3, 6)
        server.pad(raw, padded)
        report = check(server.finish(), {"PT501"})
        assert bool(report.tolerated) is harmless
        assert bool(report.findings) is not harmless


def test_unfused_top_k_reads_a_table_of_planned_rows() -> None:
    for environment, harmless in (({}, True), ({"SGLANG_DSA_FUSE_TOPK": "0"}, False)):
        server = Server(facts={"environment": environment})
        raw, padded = batch("DECODE", 3, 3), batch("DECODE", 4, 4)
        server.plan(4, raw, page_table_1__rows=3)
        server.pad(raw, padded)
        assert bool(check(server.finish(), {"PT102"}).tolerated) is harmless


def test_every_entry_states_why_and_its_source() -> None:
    for entry in TABLE:
        assert entry.why
        assert entry.source
