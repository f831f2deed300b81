"""What to call an SGLang that a path led to: the path, and what git says of it.

Its version string is that of the release it was copied or branched from, which is just what it no
longer is.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from padtrace.children import answer, python_environment
from padtrace.errors import EnvironmentMissingError

_SECONDS = 10


def name(path: str, root: Path) -> str:
    """`~/sglang (v0.5.18-12-gabc1234-dirty)`; the path alone where git knows nothing of it.

    Args:
        path: as it was given.
        root: the folder it led to.
    """
    described = describe(root)
    return f"{path} ({described})" if described else path


def describe(root: Path) -> str:
    """`git describe` of the work tree that holds a folder, empty where there is none.

    A copy inside somebody else's work tree that git does not track says nothing by it.
    """
    if shutil.which("git") is None:
        return ""
    if not _git(root, "ls-files", "--error-unmatch", "sglang/__init__.py"):
        return ""
    return _git(root, "describe", "--always", "--dirty", "--tags")


def _git(root: Path, *arguments: str) -> str:
    """The first line of what git says, empty where it fails."""
    command = ["git", "-C", str(root.absolute()), *arguments]
    try:
        code, output, _ = answer(command, _SECONDS, environment=python_environment(os.environ))
    except EnvironmentMissingError:
        return ""
    return "" if code else output.decode(errors="replace").strip().split("\n", 1)[0]
