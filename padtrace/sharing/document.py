"""Brings a whole recording to the positive list: facts, about, coverage, strings.

What sealing writes has been through here, and what `padtrace redact` writes; the proof of a file is
that going through here once more would change nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from padtrace.recording.model import Recording
from padtrace.sharing.messages import kept_string
from padtrace.sharing.rule import kept_about, kept_facts, kept_texts

_LABEL = re.compile(r"node(?:-(?:[0-9a-f]{8}|\d{1,4}))?")
# A ring's file is named by its machine, and a note may name a ring.
_RING = re.compile(r"[A-Za-z0-9-]{1,48}(?=\.\d{1,10}\.[0-9a-f]{4,32}\.(?:ring|values))")


@dataclass(frozen=True, slots=True)
class Redacted:
    """A copy that can be shared.

    Attributes:
        taken: how many values were taken out, by what they were.
    """

    recording: Recording
    taken: dict[str, int]


def kept(recording: Recording) -> Recording:
    """The recording with the texts that the list keeps; numbers, columns and values as they are."""
    return replace(
        recording,
        facts=[kept_facts(facts) for facts in recording.facts],
        about=kept_about(recording.about),
        coverage=kept_texts(recording.coverage),
        strings=[kept_string(text) for text in recording.strings],
        _snapshots={},
    )


def redacted(recording: Recording) -> Redacted:
    """A copy by today's list and of tier `shape`: same tables, so the same verdict."""
    named = without_machines(recording, _labels(recording))
    copy = kept(named)
    taken = Counter(kind_of(place) for place in differences(recording, copy))
    if recording.values:
        taken["values of tensors"] = len(recording.values)
    copy.values = {}
    copy.about["tier"] = "shape"
    for facts in copy.facts:
        if isinstance(facts.get("recorder"), dict):
            facts["recorder"]["tier"] = "shape"
    return Redacted(copy, dict(sorted(taken.items())))


def without_machines(recording: Recording, labels: Mapping[str, str]) -> Recording:
    """The names of machines replaced by their labels, in facts, notes and the run's name.

    Args:
        labels: by name of the machine.
    """
    names = [re.escape(name) for name in sorted(labels, key=len, reverse=True) if name]
    machine = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(names) or '(?!)'})(?![A-Za-z0-9])")

    def label(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        text = _RING.sub(lambda found: labels.get(found[0], "node"), text)
        return machine.sub(lambda found: labels[found[0]], text)

    about = dict(recording.about)
    about["run"] = label(about.get("run"))
    if about["run"] is None:
        del about["run"]
    if isinstance(about.get("notes"), list):
        about["notes"] = [label(note) for note in about["notes"]]
    facts = [
        {**one, "host": labels.get(one["host"], one["host"])}
        if isinstance(one.get("host"), str)
        else one
        for one in recording.facts
    ]
    return replace(recording, about=about, facts=facts)


def _labels(recording: Recording) -> dict[str, str]:
    """Numbers for the machines that an older recording names."""
    hosts = [facts.get("host") for facts in recording.facts]
    named = [host for host in hosts if isinstance(host, str) and not _LABEL.fullmatch(host)]
    return {host: f"node-{number}" for number, host in enumerate(dict.fromkeys(named))}


def differences(before: Recording, after: Recording) -> Iterator[str]:
    """Where two recordings of one origin hold another text: `facts.0.server_args.host`."""
    yield from _differ(before.facts, after.facts, "facts")
    yield from _differ(before.about, after.about, "about")
    yield from _differ(before.coverage, after.coverage, "coverage")
    yield from _differ(before.strings, after.strings, "strings")


def kind_of(place: str) -> str:
    """What lies at a place, in words."""
    parts = place.split(".")
    if parts[0] == "facts" and len(parts) > 2:
        return {
            "server_args": "server arguments",
            "environment": "environment variables",
            "host": "names of machines",
        }.get(parts[2], "facts")
    if parts[0] == "about" and len(parts) > 1:
        known = {"command": "command lines", "notes": "notes", "run": "names of runs"}
        return known.get(parts[1], "entries about the file")
    return parts[0]


def _differ(before: Any, after: Any, place: str) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name, item in before.items():
            if name in after:
                yield from _differ(item, after[name], f"{place}.{name}")
            else:
                # The name itself went; a stranger must not read it here either.
                yield f"{place}.*"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differ(old, new, f"{place}.{index}")
    elif before != after or type(before) is not type(after):
        yield place
