"""What holds for every test: a busy machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("padtrace", deadline=None)
settings.load_profile("padtrace")
