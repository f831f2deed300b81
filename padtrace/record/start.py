"""Starts recording in a scheduler process: the ring, the facts, the hooks.

Nothing here may keep a server from starting: without room for a ring, or with an SGLang in which
nothing is where it was, one line says so and the server goes on unrecorded.
"""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path
from typing import Any

from padtrace.record import settings
from padtrace.record.alarm import Alarm
from padtrace.record.facts_collector import parallel_facts, process_facts
from padtrace.record.failures import ErrorRecorder
from padtrace.record.hooks import Around
from padtrace.record.install import Installer
from padtrace.record.plain_log import make_plain
from padtrace.record.probes.context import Context
from padtrace.record.ring import EventWriter, RingUnavailable
from padtrace.record.state import State
from padtrace.record.targets import live_look

logger = logging.getLogger("padtrace")


def start() -> bool:
    """Start recording; whether it was possible. Never raises."""
    wanted = settings.from_environment(os.environ)
    if wanted is None:
        return False
    make_plain(logger)
    for problem in wanted.problems:
        logger.warning("padtrace: %s", problem)
    try:
        writer = EventWriter.create(
            wanted.folder, size_bytes=wanted.ring_bytes, policy=wanted.policy, run=wanted.run
        )
    except RingUnavailable as error:
        logger.warning("padtrace: recording of this process is off: %s", error.reason)
        return False
    try:
        _hook_everything(State(writer), wanted, writer.path)
    except Exception as error:
        logger.warning(
            "padtrace: recording of this process is off: %s: %s", type(error).__name__, error
        )
        return False
    writer.run_ahead(True)
    # Killed processes never come here; what they leave says so by not being complete.
    atexit.register(writer.close)
    if writer.moved:
        logger.warning(
            "padtrace: recording to %s and not into %s: %s",
            writer.path,
            wanted.folder,
            writer.moved,
        )
    else:
        logger.info("padtrace: recording to %s", writer.path)
    return True


def _hook_everything(state: State, wanted: settings.Settings, ring: Path) -> None:
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def register(dotted: str, hooked: Around) -> None:
        HookRegistry.register(dotted, hooked, HookType.AROUND)

    cp_rank: dict[str, int] = {}

    def attn_cp_rank() -> int:
        if not cp_rank:
            cp_rank.update(parallel_facts())
        return cp_rank.get("attn_cp_rank", 0)

    alarm = Alarm(state, str(wanted.folder)) if wanted.alarm else None
    tell: Any = alarm.failed if alarm is not None else None
    state.on_error.append(ErrorRecorder(state, tell))
    keeper = _keeper(wanted, ring)
    state.writer.facts(process_facts(wanted.tier if keeper is not None else "shape"))
    context = Context(state, ForwardBatch, attn_cp_rank)
    # Dynamo takes this one for true as well, and outside it costs half as much as is_compiling.
    compiler = torch.compiler
    is_compiling = getattr(compiler, "is_dynamo_compiling", compiler.is_compiling)
    rest = (context, alarm, live_look, register, is_compiling)
    if keeper is None:
        Installer(*rest).install()
        return
    from padtrace.record.device_values.probes import KeepingInstaller

    KeepingInstaller(keeper, *rest).install()
    atexit.register(keeper.finish)


def _keeper(wanted: settings.Settings, ring: Path) -> Any:
    """What keeps values beside the ring; None with tier `shape`, and where there is no room."""
    if wanted.tier == "shape":
        return None
    from padtrace.record.device_values import layout
    from padtrace.record.device_values.keeper import Keeper
    from padtrace.record.device_values.values_file import ValuesFile

    try:
        file = ValuesFile.create(
            ring.with_suffix(layout.SUFFIX),
            wanted.values_bytes,
            keep_first=wanted.policy == "first",
        )
    except RingUnavailable as error:
        logger.warning("padtrace: no values are kept, only shapes: %s", error.reason)
        return None
    return Keeper(file, wanted.tier)
