"""Probes that also keep values; put around the plain ones where the tier asks for it.

With tier `shape` none of this exists, so that it costs nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from padtrace.record.alarm import Alarm
from padtrace.record.device_values.keeper import Keeper
from padtrace.record.hooks import Probe
from padtrace.record.install import Installer
from padtrace.record.probes.context import Context
from padtrace.record.probes.launch import LaunchProbe
from padtrace.record.state import Frame

Keep = Callable[[Frame, Any], None]


class Keeping:
    """A probe that keeps tensors at the entry of an event, at its exit, or at both.

    `entry` and `leave` get the frame and, at exit, the result of the call.
    """

    def __init__(self, probe: Probe, entry: Keep | None, leave: Keep) -> None:
        self._probe = probe
        self._keep_entry = entry
        self._keep_exit = leave

    def enter(self, *args: Any, **kwargs: Any) -> Frame | None:
        frame = self._probe.enter(*args, **kwargs)
        if frame is not None and self._keep_entry is not None:
            self._keep_entry(frame, None)
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        self._probe.leave(frame, result)
        self._keep_exit(frame, result)


class KeepingInstaller(Installer):
    """Installs the same hooks with probes that keep values as well."""

    def __init__(self, keeper: Keeper, context: Context, alarm: Alarm | None, *rest: Any) -> None:
        super().__init__(context, alarm, *rest)
        self._keeper = keeper

    def _probe(self, kind: str, function: str) -> Any:
        keeper = self._keeper
        if kind == "launch":
            # The arguments of the first of equal launches of a forward.
            return LaunchProbe(self._context, function, self._alarm, keeper.launch)
        probe = super()._probe(kind, function)
        if kind == "init_new":
            return Keeping(
                probe, None, lambda frame, made: keeper.batch(frame.enter_seq, "exit.", made)
            )
        if kind in ("pad", "pad_inputs"):
            return Keeping(
                probe,
                lambda frame, _: keeper.batch(frame.enter_seq, "entry.", frame.subject),
                lambda frame, _: keeper.batch(frame.enter_seq, "exit.", frame.subject),
            )
        if kind == "plan":
            return Keeping(
                probe,
                None,
                lambda frame, _: keeper.plan(
                    frame.enter_seq, getattr(frame.subject, "forward_metadata", None)
                ),
            )
        return probe
