"""The environment variables: read strictly, never fatal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from padtrace.record import settings as module
from padtrace.record.settings import VARIABLES, Settings, from_environment, parse_size


def test_unset_or_empty_is_off() -> None:
    assert from_environment({}) is None
    assert from_environment({"PADTRACE_RECORD": "", "PADTRACE_TIER": "full"}) is None


def test_defaults() -> None:
    assert from_environment({"PADTRACE_RECORD": "/r"}) == Settings(
        Path("/r"), "shape", 64 * 1024 * 1024, "last", True, "", ()
    )


def test_all_of_them() -> None:
    environment = {
        "PADTRACE_RECORD": "/r",
        "PADTRACE_TIER": "meta",
        "PADTRACE_RING": "1G",
        "PADTRACE_POLICY": "Error",
        "PADTRACE_ALARM": "0",
        "PADTRACE_RUN": "slurm-17",
        "PADTRACE_VALUES": "8M",
    }
    expected = Settings(Path("/r"), "meta", 1 << 30, "error", False, "slurm-17", (), 8 << 20)
    assert from_environment(environment) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PADTRACE_TIER", "everything"),
        ("PADTRACE_RING", "lots"),
        ("PADTRACE_RING", "1"),
        ("PADTRACE_VALUES", "lots"),
        ("PADTRACE_RING", "99T"),
        ("PADTRACE_POLICY", "lats"),
        ("PADTRACE_ALARM", "yes"),
        ("PADTRACE_RUN", "a b/c"),
    ],
)
def test_a_typing_mistake_is_named_and_the_default_used(name: str, value: str) -> None:
    found = from_environment({"PADTRACE_RECORD": "/r", name: value})
    assert found is not None
    assert len(found.problems) == 1
    assert name in found.problems[0]
    assert replace(found, problems=()) == from_environment({"PADTRACE_RECORD": "/r"})


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=30)))
def test_nothing_in_the_environment_raises(environment: dict[str, str]) -> None:
    from_environment(environment)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256K", 262144),
        ("64M", 67108864),
        ("64MiB", 67108864),
        ("1g", 1 << 30),
        ("1048576", 1 << 20),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_every_variable_is_explained() -> None:
    assert module.__doc__ is not None
    assert all(name in module.__doc__ for name in VARIABLES)
