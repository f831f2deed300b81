"""Outside edits: what code between the hooks did to a batch.

The difference between the recorded batch after one event and before the next is work of code that
padtrace does not run. A replay does the same edits, counts them and lists them. Where the replayed
batch differs from the recorded one for another reason (another release padded it otherwise), the
replayed value stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from operator import itemgetter, ne
from typing import Any

from padtrace.recording import schema
from padtrace.recording.absent import Absent
from padtrace.recording.model import Snapshot, Value
from padtrace.replay.worker.batches import BatchBuilder

_NAMES = schema.SNAPSHOT.names()
_VALUES = itemgetter(*_NAMES)


@dataclass(frozen=True, slots=True)
class Edit:
    """One field that code outside the hooks changed before the event at `index`."""

    index: int
    field: str


class OutsideEdits:
    """Follows the recorded batch beside the replayed one."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder
        self.recorded: Snapshot | None = None
        self.edits: list[Edit] = []

    def after(self, recorded_exit: Snapshot | None) -> None:
        """An event ended; the recording observed the batch then."""
        if recorded_exit is not None:
            self.recorded = recorded_exit

    def after_unobserved(self, changed: Snapshot) -> None:
        """An event ended whose end no one observed: assume it did what the replay did."""
        if self.recorded is not None and changed:
            self.recorded = {**self.recorded, **changed}

    def before(self, batch: Any, recorded_entry: Snapshot | None, index: int) -> bool:
        """Apply to `batch` what changed since the last recorded state; whether anything did."""
        # Equal snapshots are one row of the recording, hence one object.
        if recorded_entry is None or recorded_entry is self.recorded:
            return False
        changed: list[str] = []
        if self.recorded is not None:
            changed = _changed(self.recorded, recorded_entry)
            self._apply(batch, recorded_entry, changed, index)
        self.recorded = recorded_entry
        return bool(changed)

    def _apply(self, batch: Any, entry: Snapshot, changed: list[str], index: int) -> None:
        if any(name.startswith("spec_info") for name in changed):
            batch.spec_info = self._builder.spec_info(entry)
        for name in changed:
            if not name.startswith("spec_info"):
                self._builder.set_field(batch, name, entry)
            self.edits.append(Edit(index, name))


def _changed(before: Snapshot, after: Snapshot) -> list[str]:
    """The columns that were observed in both, and differ."""
    names = compress(_NAMES, map(ne, _VALUES(before), _VALUES(after)))
    return [
        name
        for name in names
        if not isinstance(before[name], Absent) and not isinstance(after[name], Absent)
    ]


def changes(before: Value, after: Snapshot) -> Snapshot:
    """The columns in which two snapshots differ, with the values of the second."""
    assert isinstance(before, dict)
    if before is after:
        return {}
    return {name: value for name, value in after.items() if before.get(name) != value}
