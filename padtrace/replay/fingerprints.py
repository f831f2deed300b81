"""Hashes of SGLang's functions as they stand in the files of a release, imported or not.

The recorder hashes what `inspect.getsource` gives of each function that ran. This reads the same
lines from the release's files, so a replay states what it ran and not what was recorded, and says
"this server did not run the code you think it ran" without importing anything.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path

from padtrace.recording.model import Recording

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def of_release(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Dotted name to BLAKE2b (16 bytes) of the source, for the names that `root` has.

    Args:
        root: folder that holds `sglang`.
        names: dotted names of functions, such as `sglang.srt.layers.attention.dsa.utils.x`.
    """
    modules: dict[Path, tuple[list[str], ast.Module]] = {}
    found: dict[str, str] = {}
    for name in names:
        located = _locate(root, name)
        if located is None:
            continue
        path, inner = located
        if path not in modules:
            text = path.read_text(encoding="utf-8")
            modules[path] = (text.splitlines(keepends=True), ast.parse(text))
        lines, module = modules[path]
        definition = _definition(module, inner)
        if definition is not None:
            found[name] = _digest(lines, definition)
    return found


def restate(replayed: Recording, root: Path | None) -> None:
    """Replace the fingerprints that came with a recording by those of the SGLang that replayed."""
    for facts in replayed.facts:
        names = facts.get("fingerprints") or {}
        facts["fingerprints"] = of_release(root, names) if root is not None else {}


def _locate(root: Path, name: str) -> tuple[Path, list[str]] | None:
    """The file of a dotted name and what follows inside it."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for end in range(len(parts) - 1, 0, -1):
        stem = root.joinpath(*parts[:end])
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path, parts[end:]
    return None


def _definition(module: ast.Module, names: list[str]) -> _Definition | None:
    body: list[ast.stmt] = module.body
    node: _Definition | None = None
    for name in names:
        node = next((n for n in body if isinstance(n, _Definition) and n.name == name), None)
        if node is None:
            return None
        body = node.body
    return node


def _digest(lines: list[str], node: _Definition) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = "".join(lines[first - 1 : node.end_lineno])
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
