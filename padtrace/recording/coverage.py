"""What was seen and what was not: the typed view of `Recording.coverage`.

Keys that the view does not know are kept in the file and ignored here. Processes are named by
their row, as text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from padtrace.errors import BadRecordingError


class Hook(msgspec.Struct, kw_only=True):
    """One hook over all processes.

    Attributes:
        status: found, moved, absent or lost: the worst of any process.
        target: the hooked function.
        fired: calls seen, by process.
        note: what a recording cannot say without it, or why it was lost.
        lost_in: processes in which its probe failed.
    """

    status: str = "unknown"
    target: str | None = None
    fired: dict[str, int] = {}
    note: str | None = None
    lost_in: list[int] = []


class Blind(msgspec.Struct, kw_only=True):
    """What the recorder knows it did not see.

    Attributes:
        missing_ranks: global ranks without a ring.
        ended_suddenly: global ranks that ended without a word.
        graph_forwards: forwards in replayed graphs, by process.
        dropped, refused, bad, static_refused, damaged: events or records lost, by process.
        values: counters of the values of tensors, by process.
    """

    missing_ranks: list[int] = []
    ended_suddenly: list[int] = []
    graph_forwards: dict[str, int] = {}
    dropped: dict[str, int] = {}
    refused: dict[str, int] = {}
    bad: dict[str, int] = {}
    static_refused: dict[str, int] = {}
    damaged: dict[str, int] = {}
    values: dict[str, dict[str, int]] = {}


class OutsideEdit(msgspec.Struct, kw_only=True):
    """An edit by code between hooked functions, which a replay takes as recorded."""

    field: str
    process: int | None = None
    enter_seq: int | None = None
    count: int = 1


class Kernel(msgspec.Struct, kw_only=True):
    """What answered the launches of a replay; see `Launches.summary` of the worker."""

    asked: str | None = None
    name: str | None = None
    why: str | None = None
    outcomes: dict[str, int] = {}
    without_answer: list[str] = []


class Replay(msgspec.Struct, kw_only=True):
    """What a replay did and did not do.

    Attributes:
        not_replayed: forwards that were left out, by reason.
        equal_inputs: batches answered from an equal one.
    """

    outside_edits: int = 0
    outside_edit_list: list[OutsideEdit] = []
    not_replayed: dict[str, int] = {}
    equal_inputs: int = 0
    kernel: Kernel = msgspec.field(default_factory=Kernel)


class DrivenDifference(msgspec.Struct, kw_only=True):
    """One value that a driven event has otherwise than the recorded one; values as text."""

    column: str
    recorded: str | None = None
    driven: str | None = None
    process: int | None = None
    enter_seq: int | None = None


class Compared(msgspec.Struct, kw_only=True):
    """What holding the driven events against the recorded ones gave.

    Attributes:
        differences: the first of them.
        not_compared: values that were not, by reason.
    """

    events: int = 0
    values: int = 0
    different: int = 0
    differences: list[DrivenDifference] = []
    not_compared: dict[str, int] = {}


class ShownDevice(msgspec.Struct, kw_only=True):
    """Which device SGLang was shown, and the assumption behind it."""

    shown: str | None = None
    assumed: str | None = None


class Driven(msgspec.Struct, kw_only=True):
    """What of a replay SGLang's own driver ran.

    Attributes:
        driven: forwards.
        not_driven: forwards that it did not run, by reason.
        compared: None where nothing was compared.
    """

    driven: int = 0
    not_driven: dict[str, int] = {}
    compared: Compared | None = None
    device: ShownDevice = msgspec.field(default_factory=ShownDevice)


class Coverage(msgspec.Struct, kw_only=True):
    """See the module. `replay` and `driven` are None where the file is no replay's."""

    hooks: dict[str, Hook] = {}
    blind: Blind = msgspec.field(default_factory=Blind)
    replay: Replay | None = None
    driven: Driven | None = None


def view(coverage: dict[str, Any]) -> Coverage:
    """The typed view.

    Raises:
        BadRecordingError: a known key holds something of the wrong type.
    """
    try:
        return msgspec.convert(coverage, Coverage)
    except msgspec.ValidationError as error:
        raise BadRecordingError(
            "bad recording: its coverage cannot be read",
            str(error),
            "the file was not written by padtrace; ask for it again",
        ) from error
