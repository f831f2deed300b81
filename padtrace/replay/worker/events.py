"""Recorded events as a replay reads them: decoded column by column, when asked."""

from __future__ import annotations

from padtrace.recording import schema
from padtrace.recording.absent import HIGHEST_ABSENT_CODE, NOT_OBSERVED_CODE, value_of
from padtrace.recording.model import Recording, Snapshot, Value

HEADER = tuple(column.name for column in schema.HEADER)
_PLACES = {
    kind: {
        column.name: (place, column.type) for place, column in enumerate(schema.event_columns(kind))
    }
    for kind in schema.EVENT_KINDS
}
_OWN = {kind: tuple(places)[len(HEADER) :] for kind, places in _PLACES.items()}
_INT, _BOOL = schema.ColumnType.INT, schema.ColumnType.BOOL
_SYNC_INPUTS = (
    *("counts_before", "logprob_counts_before", "can_run_dp_cuda_graph"),
    *("draft_counts_before", "draft_logprob_counts_before"),
)
_ENTER_AT, _PARENT_AT = HEADER.index("enter_seq"), HEADER.index("parent")


class RecordedEvent:
    """One event of the recording; like `recording.model.Event`, but it decodes what is read."""

    __slots__ = ("_raw", "_recording", "kind")

    def __init__(self, kind: str, raw: list[int], recording: Recording) -> None:
        self.kind = kind
        self._raw = raw
        self._recording = recording

    def __getitem__(self, name: str) -> Value:
        place, column_type = _PLACES[self.kind][name]
        code = self._raw[place]
        if code <= HIGHEST_ABSENT_CODE:
            return value_of(code)
        if column_type is _INT or column_type is _BOOL:
            return code
        recording = self._recording
        if column_type is schema.ColumnType.STRING:
            return recording.strings[code]
        if column_type is schema.ColumnType.VECTOR:
            return recording.vector(code)
        if column_type is schema.ColumnType.SNAPSHOT:
            return recording.snapshot(code)
        if column_type is schema.ColumnType.STRINGS:
            return [recording.strings[index] for index in recording.vector(code)]
        return code

    def integer(self, name: str) -> int | None:
        """The value if it is a real integer, otherwise None."""
        value = self[name]
        return value if isinstance(value, int) else None

    def text(self, name: str) -> str | None:
        value = self[name]
        return value if isinstance(value, str) else None

    def vector(self, name: str) -> list[int] | None:
        value = self[name]
        return value if isinstance(value, list) else None  # type: ignore[return-value]

    def snapshot(self, name: str) -> Snapshot | None:
        """A snapshot of which something was observed, otherwise None."""
        code = self._raw[_PLACES[self.kind][name][0]]
        if code <= HIGHEST_ABSENT_CODE:
            return None
        value = self._recording.snapshot(code)
        return value if isinstance(value["forward_mode"], str) else None

    def code(self, name: str) -> int:
        """A column as it is stored; no column of this kind is a code that nothing has."""
        place = _PLACES[self.kind].get(name)
        return NOT_OBSERVED_CODE if place is None else self._raw[place[0]]

    def inputs(self) -> tuple[int, ...]:
        """Of a `sync`: the scheduler's counts and votes, as they are stored."""
        return tuple(self.code(name) for name in _SYNC_INPUTS)

    def own(self) -> dict[str, Value]:
        """Every column that is not of the header."""
        return {name: self[name] for name in _OWN[self.kind]}

    @property
    def entered(self) -> int:
        """Its place in the order of the process."""
        return max(self._raw[_ENTER_AT], 0)

    @property
    def place(self) -> tuple[int, int]:
        """`enter_seq` and `parent` as they are stored."""
        return self._raw[_ENTER_AT], self._raw[_PARENT_AT]

    def header_codes(self) -> list[int]:
        """The header's columns as they are stored, strings by their number in the recording."""
        return self._raw[: len(HEADER)]
