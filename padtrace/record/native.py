"""The hot classes of the recorder: compiled where the extension was built, else plain Python."""

from __future__ import annotations

from padtrace.record.ring_core import RingCore as RingCore
from padtrace.record.ring_core import Snapshot as Snapshot
