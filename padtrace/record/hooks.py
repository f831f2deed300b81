"""One hooked function: the original runs exactly once, whatever happens to the probe.

The probe is asked before and after. If it fails it is counted, named once in the log and switched
off; the server's own result and the server's own exception pass through unchanged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from padtrace.record import native
from padtrace.record.native import HookCore
from padtrace.record.state import Frame, State

logger = logging.getLogger("padtrace")

Around = Callable[..., Any]


class Probe(Protocol):
    """What is asked around one hooked function.

    `enter` gets the arguments of the call and opens an event, or returns None where this call is
    not to be recorded; then `leave` is not asked. `leave` gets what `enter` opened and the result.
    """

    def enter(self, *args: Any, **kwargs: Any) -> Frame | None: ...

    def leave(self, frame: Frame, result: Any) -> None: ...


class Hook(HookCore):
    """One hooked function: whether its probe still works, and what coverage calls it."""

    def __init__(self, state: State, name: str, number: int) -> None:
        super().__init__(number)
        self._state = state
        self.name = name

    def lose(self, error: Exception, depth: int) -> None:
        """The probe failed: switch it off and forget what it opened.

        Args:
            depth: how many events were open before the probe was asked.
        """
        self.alive = False
        del self._state.open[depth:]
        try:
            self._state.let_go()
            reason = f"{type(error).__name__} in the probe"
            self._state.writer.lost(self.number, self._state.string(reason))
            logger.warning(
                "padtrace: the probe of %s failed and is off: %s: %s",
                self.name,
                type(error).__name__,
                error,
            )
        except Exception:
            # Even a log handler may fail; the server goes on.
            return


def around(hook: Hook, probe: Probe, state: State, is_compiling: Callable[[], bool]) -> Around:
    """The function to give to SGLang's registry as an AROUND hook."""
    enter, leave = probe.enter, probe.leave
    if native.compiled is not None:
        call = native.compiled.Call(hook, state, enter, leave, state.guard.__exit__)
        return by_extension(call, is_compiling)
    running, guard, count, number = state.open, state.guard, state.writer.count, hook.number

    def hooked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        frame = None
        depth = len(running)
        if hook.alive:
            try:
                count(number)
                frame = enter(*args, **kwargs)
            except Exception as error:
                hook.lose(error, depth)
        if frame is None:
            return original(*args, **kwargs)
        if depth:
            result = original(*args, **kwargs)
        else:
            with guard:
                result = original(*args, **kwargs)
        if hook.alive:
            try:
                leave(frame, result)
            except Exception as error:
                hook.lose(error, depth)
        else:
            # Lost by a call inside this one.
            del running[depth:]
        return result

    return hooked


def by_extension(call: Any, is_compiling: Callable[[], bool]) -> Around:
    """A hook whose work the extension does, as a function that torch.compile can look into.

    Whoever calls the function gets `call` at once, wherever the interpreter allows it. So calls
    from code that torch.compile gave up on (a graph break) are recorded; without the extension
    torch.compile takes the hook for a part of that code, and they are not.
    """

    def hooked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        return call.packed(original, args, kwargs)

    def of(original: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            return call.packed(original, args, kwargs)

        native.compiled.stand_in(one)
        return one

    native.compiled.stand_in(hooked)
    # For `bound`: a call less where the original is known.
    hooked.of = of  # type: ignore[attr-defined]
    return hooked


def bound(hooked: Around, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that stands for `original`, with the hook around it."""
    of = getattr(hooked, "of", None)
    if of is not None:
        return functools.update_wrapper(of(original), original)

    @functools.wraps(original)
    def one(*args: Any, **kwargs: Any) -> Any:
        return hooked(original, *args, **kwargs)

    return one


def watching(
    hook: Hook,
    state: State,
    is_compiling: Callable[[], bool],
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> Around:
    """An AROUND hook for functions that are no events of their own.

    `before` gets the arguments of the call, `after` the result and then the arguments.
    """
    watch = Watch(state, hook.name)
    if native.compiled is not None:
        call = native.compiled.Call(hook, state, before, after, watch.__exit__, True)
        return by_extension(call, is_compiling)
    running, count, number = state.open, state.writer.count, hook.number

    def hooked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        if hook.alive:
            depth = len(running)
            try:
                count(number)
                if before is not None:
                    before(*args, **kwargs)
            except Exception as error:
                hook.lose(error, depth)
        if running:
            result = original(*args, **kwargs)
        else:
            with watch:
                result = original(*args, **kwargs)
        if after is not None and hook.alive:
            depth = len(running)
            try:
                after(result, *args, **kwargs)
            except Exception as error:
                hook.lose(error, depth)
        return result

    return hooked


class Watch:
    """Like the state's guard, for a function that opens no event."""

    __slots__ = ("_state", "_title")

    def __init__(self, state: State, title: str) -> None:
        self._state = state
        self._title = title

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            try:
                for hear in self._state.on_error:
                    hear(error, self._title, self._state.nobody)
            except Exception:
                # As in the guard: the server's own exception must be what is seen.
                return
