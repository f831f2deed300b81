"""Where a recording came from: the typed view of `Recording.about`.

Keys that the view does not know are kept in the file and ignored here. What is not stated is None
or empty.
"""

from __future__ import annotations

from typing import Any

import msgspec

from padtrace.errors import BadRecordingError

UNKNOWN = "unknown"


class About(msgspec.Struct, kw_only=True):
    """See the module.

    Attributes:
        source: server, made or replay.
        tier: shape, meta or full: what values of tensors the file may hold.
        sglang: the release that made the rows.
        sglang_source: where a replay took that release from.
        sglang_name: what a copy or a checkout is called: its path and git description.
        producer: the padtrace that wrote the file.
        created_ns, started_ns: when it was sealed, and when recording began; ns since the epoch.
        run: name of the recorded run.
        command: of the server.
        exit_code: of the server.
        notes: what had to be said about making the file, one line each.
        plan: of a made recording: auto, before or after.
        of: digest of the recording that was replayed.
        of_source, recorded_on: its source and its release.
        fingerprints: how its sources compared: match or differ.
        chains, chain_texts: see `contracts.chains`; the numbers of one index the other.
    """

    source: str = UNKNOWN
    tier: str = UNKNOWN
    sglang: str | None = None
    sglang_source: str | None = None
    sglang_name: str | None = None
    release: str | None = None
    producer: str | None = None
    created_ns: int | None = None
    started_ns: int | None = None
    run: str | None = None
    command: str | None = None
    exit_code: int | None = None
    notes: list[str] | None = None
    plan: str | None = None
    of: str | None = None
    of_source: str | None = None
    recorded_on: str | None = None
    fingerprints: str = UNKNOWN
    chains: dict[str, int] = {}
    chain_texts: list[list[str]] = []


def view(about: dict[str, Any]) -> About:
    """The typed view.

    Raises:
        BadRecordingError: a known key holds something of the wrong type, or a chain has no text.
    """
    try:
        stated = msgspec.convert(about, About)
    except msgspec.ValidationError as error:
        raise _bad(str(error)) from error
    texts = len(stated.chain_texts)
    if any(not 0 <= index < texts for index in stated.chains.values()):
        raise _bad(f"a chain points past the {texts} texts there are")
    return stated


def _bad(why: str) -> BadRecordingError:
    return BadRecordingError(
        "bad recording: what it says about itself cannot be read",
        why,
        "the file was not written by padtrace; ask for it again",
    )
