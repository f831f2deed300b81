"""Test only, on the PYTHONPATH of one server: every probe of the recorder fails, sooner or later.

The first rank's probes fail before the hooked call, the second rank's after it; each hook fails at
a call of its own, so that probes are lost while others still work. Patched from outside, so that
the recorder has no switch for it.
"""

import itertools
import os
import sys
from importlib import abc, machinery

_TARGET = "padtrace.record.install"
_numbers = itertools.count()


def _failing(function, after):
    """`function` until it was called `after` times; from then on it raises."""
    calls = itertools.count()

    def fail(*args, **kwargs):
        if next(calls) < after or function is None:
            return function(*args, **kwargs) if function is not None else None
        raise ValueError("injected by the test")

    return fail


def _first_rank():
    """The processes of a server are numbered by who comes first to make this folder."""
    try:
        os.mkdir(os.environ["PADTRACE_TEST_FAULTS"])
    except FileExistsError:
        return False
    return True


def _patch(install):
    from padtrace.record.probes.launch import LaunchProbe

    early = _first_rank()
    around, watching, launch = install.around, install.watching, LaunchProbe.around

    def faulty_around(hook, probe, *rest):
        name = "enter" if early else "leave"
        setattr(probe, name, _failing(getattr(probe, name), next(_numbers) % 4))
        return around(hook, probe, *rest)

    def faulty_watching(hook, state, compiling, before=None, after=None):
        before = _failing(before, 0) if before else None
        after = _failing(after, 0) if after else None
        return watching(hook, state, compiling, before=before, after=after)

    def faulty_launch(self, hook, compiling):
        name = "_enter" if early else "_leave"
        setattr(self, name, _failing(getattr(self, name), next(_numbers) % 4))
        return launch(self, hook, compiling)

    install.around, install.watching = faulty_around, faulty_watching
    LaunchProbe.around = faulty_launch


class _Finder(abc.MetaPathFinder):
    """Patches the installer of the hooks when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _patch(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("PADTRACE_TEST_FAULTS"):
    sys.meta_path.insert(0, _Finder())
