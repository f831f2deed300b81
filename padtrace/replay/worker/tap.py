"""Padtrace's own recorder in a worker: its probes, with memory in the place of a ring.

What a live server is recorded by also tells what SGLang does here, so that a driven event and a
recorded one are made by one code and can be compared column by column.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from padtrace.errors import EnvironmentMissingError
from padtrace.record import wire
from padtrace.record.hooks import Around
from padtrace.record.install import Installer, wrap_attribute
from padtrace.record.probes.context import Context
from padtrace.record.state import ERROR, BatchRecord, State
from padtrace.record.targets import live_look, resolve
from padtrace.recording import schema
from padtrace.recording.absent import (
    HIGHEST_ABSENT_CODE,
    NOT_OBSERVED_CODE,
    value_of,
)
from padtrace.recording.model import Snapshot, Value
from padtrace.replay.worker.copies import replace_copies
from padtrace.replay.worker.errors import error_values
from padtrace.replay.worker.standins import NotHeldError

Note = Callable[[int, Sequence[int], Sequence[int]], None]
HEADER = tuple(column.name for column in schema.HEADER)
_PLAIN = (schema.ColumnType.INT, schema.ColumnType.BOOL)


@dataclass(slots=True)
class DrivenEvent:
    """One event that SGLang's own path gave.

    Attributes:
        header: the columns that every event has, as integers, strings by number of the tap.
        values: its own columns, decoded.
    """

    kind: str
    header: dict[str, int]
    values: dict[str, Value]

    @property
    def entered(self) -> int:
        return self.header["enter_seq"]


class MemoryWriter:
    """The part of `record.ring.EventWriter` that probes call, into lists."""

    clock_offset_ns = 0
    on = True

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self.failed: list[str] = []
        self._hooks: list[str] = []
        self._events: list[tuple[int, list[int], Sequence[int]]] = []
        self._by_number: dict[tuple[int, int], list[int]] = {}
        self._snapshots: list[Any] = []
        self._decoded: dict[int, Snapshot] = {}
        self.note: Note | None = None

    def string(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return number

    def hook(self, name: str, status: str, target: str = "", note: str = "") -> int:
        self._hooks.append(name)
        return len(self._hooks) - 1

    def lost(self, hook: int, reason: int) -> None:
        self.failed.append(f"{self._hooks[hook]}: {self.texts[reason]}")

    def facts(self, patch: Any) -> None:
        """A replay has the facts already."""

    def count(self, hook: int, n: int = 1) -> None:
        """Nobody asks how often a hook was called here."""

    def write(self, kind: int, scalars: Sequence[int], values: Sequence[int] = ()) -> None:
        listed = list(scalars)
        self._events.append((kind, listed, values))
        self._by_number[kind, listed[_ENTER_AT]] = listed
        if self.note is not None:
            self.note(kind, listed, values)

    def update(self, kind: int, enter_seq: int, pairs: Sequence[int]) -> None:
        scalars = self._by_number.get((kind, enter_seq))
        if scalars is not None:
            for place, value in zip(pairs[::2], pairs[1::2], strict=True):
                scalars[place] = value

    def keep(self, snapshot: Any) -> int:
        number: int = snapshot.reference
        if 0 <= number < len(self._snapshots) and self._snapshots[number] is snapshot:
            return number
        if not snapshot.scalars:
            return NOT_OBSERVED_CODE
        snapshot.reference = len(self._snapshots)
        self._snapshots.append(snapshot)
        return len(self._snapshots) - 1

    def take(self) -> list[DrivenEvent]:
        """The events since the last call, in order of entry."""
        taken = [self._decode(*event) for event in self._events]
        taken.sort(key=lambda event: event.entered)
        self._events.clear()
        self._by_number.clear()
        self._snapshots.clear()
        self._decoded.clear()
        return taken

    def _decode(self, kind: int, scalars: list[int], values: Sequence[int]) -> DrivenEvent:
        name = wire.KINDS[kind]
        header = dict(zip(HEADER, scalars, strict=False))
        return DrivenEvent(name, header, self._columns(name, scalars, values, len(HEADER)))

    def _columns(
        self, kind: str, scalars: Sequence[int], values: Sequence[int], first: int
    ) -> dict[str, Value]:
        decoded: dict[str, Value] = {}
        at = 0
        for field, code in zip(_fields(kind, first), scalars[first:], strict=True):
            if code <= HIGHEST_ABSENT_CODE:
                decoded[field.name] = value_of(code)
            elif field.type in _PLAIN:
                decoded[field.name] = int(code)
            elif field.type is schema.ColumnType.STRING:
                decoded[field.name] = self.texts[code]
            elif field.type is schema.ColumnType.SNAPSHOT:
                decoded[field.name] = self._snapshot(code)
            else:
                part = list(values[at : at + code])
                at += code
                strings = field.type is schema.ColumnType.STRINGS
                decoded[field.name] = [self.texts[n] for n in part] if strings else part
        return decoded

    def _snapshot(self, number: int) -> Snapshot:
        found = self._decoded.get(number)
        if found is None:
            kept = self._snapshots[number]
            found = self._columns(wire.SNAPSHOT, kept.scalars, kept.values, 0)
            self._decoded[number] = found
        return found


@cache
def _fields(kind: str, first: int) -> tuple[wire.Field, ...]:
    return wire.fields(kind)[first:]


_ENTER_AT = HEADER.index("enter_seq")


class _WorkerInstaller(Installer):
    """Installs the probes at once; a strict runner has no facts to tell."""

    def tell_runner(self, model_runner: Any) -> None:
        return None

    def _fingerprint(self, dotted: str, function: Any) -> None:
        return None


class Tap:
    """The probes of one worker, installed once, and what they saw last.

    Attributes:
        raised: SGLang's own exception of the drive that runs, once one left a hooked call.
    """

    def __init__(self, batch_class: type) -> None:
        self.writer = MemoryWriter()
        # The probes ask for EventWriter by what it does, which is here.
        self.state = State(self.writer)  # type: ignore[arg-type]
        self.state.on_error.append(self._raised)
        self._cp_rank = 0
        self._context = Context(self.state, batch_class, lambda: self._cp_rank)
        self.raised: BaseException | None = None

    def install(self) -> None:
        """Put every probe around its function; the kernels must have their stand-ins already."""
        _WorkerInstaller(self._context, None, live_look, _register, lambda: False).install()

    def begin(self, cp_rank: int, note: Note | None = None) -> None:
        """Number events from 0 again; backends keep their numbers until `new_process`.

        Args:
            note: told of every event as it is written: kind, scalars, values.
        """
        state = self.state
        self._cp_rank = cp_rank
        state.seq = state.batches = state.forwards = 0
        state.forward = NOT_OBSERVED_CODE
        state.open.clear()
        self.raised = None
        self.writer.take()
        self.writer.note = note

    def new_process(self) -> None:
        """Number backends anew, and let the old ones go."""
        if self._context.backends is not None:
            self._context.backends.forget()

    def end(self) -> list[DrivenEvent]:
        """What happened since `begin`.

        Raises:
            EnvironmentMissingError: a probe failed, so that something was not seen.
        """
        if self.writer.failed:
            failed = self.writer.failed.pop()
            self.writer.failed.clear()
            raise EnvironmentMissingError(
                f"padtrace's own probe failed in the replay: {failed}",
                "an event of this forward was not seen",
                "report this to padtrace's maintainers",
            )
        return self.writer.take()

    def note_error(self, error: Exception) -> None:
        """SGLang raised outside every hooked function."""
        self._raised(error, "", self.state.nobody)

    def _raised(self, error: BaseException, function: str, record: BatchRecord) -> None:
        """One error event, in SGLang's own words: a replay holds no user's data."""
        if self.raised is not None or isinstance(error, NotHeldError):
            return
        self.raised = error
        state, string = self.state, self.writer.string
        told = error_values(function, error)
        frames = [string(str(frame)) for frame in told["frames"]]  # type: ignore[union-attr]
        frame = state.enter(function, record)
        exit_seq = state.leave(frame)
        own = (
            string(function),
            string(str(told["type"])),
            string(str(told["message"])),
            len(frames),
        )
        state.event(ERROR, frame, exit_seq, own, frames)


def _register(dotted: str, hooked: Around) -> None:
    """Wrap a function where it lives, and the copies that other modules of SGLang hold."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:cut]))
        if module is None:
            continue
        holder = resolve(module, ".".join(parts[cut:-1])) if parts[cut:-1] else module
        if holder is not None:
            before = getattr(holder, parts[-1])
            wrap_attribute(holder, parts[-1], hooked)
            if holder is module:
                replace_copies(parts[-1], before, getattr(holder, parts[-1]))
        return
