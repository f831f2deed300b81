"""The part of the process's state that every hooked call goes through, in plain Python.

`record.native` has the same classes compiled, where they could be; these say what they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from padtrace.record.ring_core import RingCore
from padtrace.recording.absent import NOT_OBSERVED_CODE


class Frame:
    """One hooked call that is running: an open event.

    Attributes:
        enter_seq: its number, and so its place in the order of all entries and exits.
        parent: number of the event it is nested in, or NOT_OBSERVED_CODE.
        t_ns: when it began, on the wall clock.
        record: the batch it belongs to.
        title: what it is called in a sentence.
        kind: the kind of event that its probe opened, or -1.
        subject, extra, entry: what its probe keeps until the call ends: mostly the object the call
            is about, what else it needs, and the snapshot before.
        failed: called instead of the probe where the call raises, with the frame and whether the
            exception was seen leaving it.
    """

    __slots__ = (
        "enter_seq",
        "entry",
        "extra",
        "failed",
        "kind",
        "numbers",
        "parent",
        "record",
        "subject",
        "t_ns",
        "title",
    )

    kind: int
    entry: Any
    numbers: list[int]
    enter_seq: int
    parent: int
    t_ns: int
    record: Any
    title: str
    subject: Any
    extra: Any
    failed: Callable[[Frame, bool], None] | None

    def subject_is(self, candidate: Any) -> bool:
        return self.subject is candidate

    def get(self, place: int) -> int:
        """One of the numbers that the probe keeps in the frame."""
        return self.numbers[place]

    def put(self, place: int, number: int) -> None:
        self.numbers[place] = number


class BatchRecord:
    """What is known of one ForwardBatch object.

    Attributes:
        number: the batch id.
        worker: string id of "target" or "draft".
        owner: id() of the object, since a shallow copy carries this record along.
        draft_step: index of the current forward of a draft batch; 0 for the first.
        forwards: ModelRunner.forward calls so far.
        scheduler_counts: the scheduler's own list of counts, to see whether the pad edits it.
        planned_by, planned_seq, planned_rows, planned_splits: what planned last, the number of that
            event, and what it made, for the alarm; the first is None where nothing did.
        padded_by, padded_seq, rows_before_pad, rows_after_pad: the same of what padded last.
    """

    __slots__ = (
        "draft_step",
        "forwards",
        "number",
        "owner",
        "padded_by",
        "padded_seq",
        "planned_by",
        "planned_rows",
        "planned_seq",
        "planned_splits",
        "rows_after_pad",
        "rows_before_pad",
        "scheduler_counts",
        "worker",
    )

    def __init__(self, number: int, worker: int, owner: int = 0) -> None:
        self.number = number
        self.worker = worker
        self.owner = owner
        self.draft_step = 0
        self.forwards = 0
        self.scheduler_counts: list[int] | None = None
        self.planned_by: str | None = None
        self.padded_by: str | None = None

    def planned(self, by: str, enter_seq: int, rows: int, num_splits: int) -> None:
        self.planned_by = by
        self.planned_seq = enter_seq
        self.planned_rows = rows
        self.planned_splits = num_splits

    def padded(self, by: str, enter_seq: int, before: int, after: int) -> None:
        self.padded_by = by
        self.padded_seq = enter_seq
        self.rows_before_pad = before
        self.rows_after_pad = after


class HookCore:
    """One hook: whether its probe still works, and the number the ring counts its calls by."""

    def __init__(self, number: int) -> None:
        self.alive = True
        self.number = number


class StateCore:
    """Numbers the events, nests them, and writes them with the columns every event has.

    Attributes:
        seq: the next number.
        batches, forwards: the next numbers of a batch and of a forward.
        forward: number of the forward that runs, or NOT_OBSERVED_CODE.
        step, step_source, phase: what the columns of these names say of events now.
        syncs, rounds: how many of either were counted.
        source_sync: what step_source says once a collective was seen.
        capture_phase, calm_phase: the phase while a graph is captured, and otherwise.
        serve_phase: the latter once a step was counted.
        capturing: SGLang's get_is_capture_mode, once it is found.
        open: the frames of the calls that are running, innermost last.
    """

    def __init__(self, ring: RingCore, clock_offset: int) -> None:
        """
        Args:
            clock_offset: wall clock minus monotonic clock, ns.
        """
        self._ring = ring
        self.clock_offset = clock_offset
        self.seq = self.batches = self.forwards = 0
        self.forward = NOT_OBSERVED_CODE
        self.step = self.step_source = self.phase = 0
        self.capture_phase = self.calm_phase = self.serve_phase = 0
        self.syncs = self.rounds = self.source_sync = 0
        self.capturing: Callable[[], bool] | None = None
        self.open: list[Frame] = []

    def enter(self, title: str, record: Any) -> Frame:
        """Open an event nested in the innermost open one."""
        running = self.open
        frame = Frame()
        frame.enter_seq = seq = self.seq
        self.seq = seq + 1
        if running:
            frame.parent = running[-1].enter_seq
        else:
            frame.parent = NOT_OBSERVED_CODE
            self._set_phase()
        frame.record = record
        frame.title = title
        frame.kind = -1
        frame.failed = frame.subject = frame.extra = frame.entry = None
        frame.t_ns = time.monotonic_ns() + self.clock_offset
        running.append(frame)
        return frame

    def leave(self, frame: Frame) -> int:
        """Close an event and everything left open inside it; returns its exit number."""
        running = self.open
        if running and running[-1] is frame:
            running.pop()
        else:
            self._abandon(frame)
        seq = self.seq
        self.seq = seq + 1
        return seq

    def count_sync(self) -> None:
        """The collective that all ranks of a sync group make together was entered."""
        self.syncs = self.step = self.syncs + 1
        self.step_source = self.source_sync
        self.calm_phase = self.serve_phase

    def count_round(self) -> None:
        """`run_batch` was entered; it counts as the step where no collective runs."""
        self.rounds += 1
        self.calm_phase = self.serve_phase
        if not self.syncs:
            self.step = self.rounds

    def event(
        self,
        kind: int,
        frame: Frame,
        exit_seq: int,
        own: Sequence[int],
        values: Sequence[int] = (),
    ) -> None:
        """Write an event; never raises.

        Args:
            own: the scalars of this kind of event, in schema order, after those all events have.
            values: the values of its vectors; see `record.wire`.
        """
        record = frame.record
        scalars = [
            0,  # the process; seal puts it in
            record.worker,
            record.number,
            self.forward,
            record.draft_step,
            self.step,
            self.step_source,
            frame.enter_seq,
            exit_seq,
            frame.parent,
            self.phase,
            frame.t_ns,
        ]
        scalars += own
        self._ring.write(kind, scalars, values)

    def _set_phase(self) -> None:
        raise NotImplementedError

    def _abandon(self, frame: Frame) -> None:
        raise NotImplementedError
