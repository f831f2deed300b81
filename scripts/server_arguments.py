"""Writes padtrace/sharing/server_arguments.json: the server arguments of all tested releases.

Read from the source of each release, without running it: which arguments take a number, which take
one of a closed set of words, and by which flags they are given. Run it when a release is added:

    python scripts/server_arguments.py
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from padtrace.replay import releases

TARGET = Path(__file__).resolve().parent.parent / "padtrace/sharing/server_arguments.json"
_SOURCES = ("srt/server_args.py", "srt/arg_groups/*.py", "srt/arg_groups/fields/*.py")
_NUMBERS = {"int", "float"}
_ALL = ("choices", "numbers", "flags")


class Reader:
    """Collects from the sources of one release after the other."""

    def __init__(self) -> None:
        self.choices: dict[str, set[str]] = {}
        self.numbers: set[str] = set()
        self.flags: dict[str, str] = {}
        self._constants: dict[str, ast.expr] = {}

    def read(self, package: Path) -> None:
        """`package` is the folder `sglang` of a release."""
        trees = [
            ast.parse(path.read_text())
            for pattern in _SOURCES
            for path in sorted(package.glob(pattern))
        ]
        self._constants = dict(_assigned(trees))
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._fields(node)
                elif isinstance(node, ast.Call) and _name(node.func) == "add_argument":
                    self._flag(node)

    def as_json(self) -> dict[str, Any]:
        return {
            "choices": {name: sorted(self.choices[name]) for name in sorted(self.choices)},
            "numbers": sorted(self.numbers),
            "flags": {flag: self.flags[flag] for flag in sorted(self.flags)},
        }

    def _fields(self, node: ast.ClassDef) -> None:
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                self._field(line.target.id, line.annotation)

    def _field(self, name: str, annotation: ast.expr) -> None:
        kinds = {item.id for item in ast.walk(annotation) if isinstance(item, ast.Name)}
        self._typed(name, kinds)
        for item in ast.walk(annotation):
            if isinstance(item, ast.Subscript) and _name(item.value) == "Literal":
                self._add(name, self._texts(item.slice))
            elif isinstance(item, ast.Call) and _name(item.func) == "Arg":
                given = {keyword.arg: keyword.value for keyword in item.keywords}
                self._add(name, self._texts(given.get("choices")))
                for flag in self._texts(given.get("aliases")) | self._texts(given.get("cli_name")):
                    self._alias(flag, name)

    def _flag(self, call: ast.Call) -> None:
        flags = [text for argument in call.args for text in self._texts(argument)]
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        long = [flag for flag in flags if flag.startswith("--")]
        if not long:
            return
        stated = self._texts(given.get("dest"))
        name = next(iter(stated), None) or _plain(long[0])
        for flag in long:
            self._alias(flag, name)
        self._add(name, self._texts(given.get("choices")))
        kinds = {_name(given["type"])} if "type" in given else set()
        self._typed(name, kinds)

    def _typed(self, name: str, kinds: set[str]) -> None:
        if "str" in kinds:
            return
        if kinds & _NUMBERS:
            self.numbers.add(name)

    def _alias(self, flag: str, name: str) -> None:
        if _plain(flag) != name:
            self.flags[_plain(flag)] = name

    def _add(self, name: str, texts: Iterable[str]) -> None:
        if texts := set(texts):
            self.choices.setdefault(name, set()).update(texts)

    def _texts(self, node: ast.expr | None, depth: int = 0) -> set[str]:
        """Every text that an expression of lists and names of lists holds."""
        if node is None or depth > 8:
            return set()
        if isinstance(node, ast.Constant):
            return {node.value} if isinstance(node.value, str) else set()
        if isinstance(node, ast.Name):
            return self._texts(self._constants.get(node.id), depth + 1)
        parts: list[ast.expr] = []
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            parts = node.elts
        elif isinstance(node, ast.BinOp):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Starred):
            parts = [node.value]
        elif isinstance(node, ast.Call) and _name(node.func) in ("list", "sorted", "tuple"):
            parts = node.args
        return {text for part in parts for text in self._texts(part, depth + 1)}


def _assigned(trees: list[ast.Module]) -> Iterable[tuple[str, ast.expr]]:
    for line in (line for tree in trees for line in tree.body):
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.expr):
            yield target.id, value


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def server_arguments(packages: Iterable[Path]) -> dict[str, Any]:
    """What the file holds, from the folders `sglang` of the releases."""
    reader = Reader()
    for package in packages:
        reader.read(package)
    return reader.as_json()


def as_text(found: dict[str, Any]) -> str:
    """The file: one argument a line, so that a difference can be read."""
    lines = []
    for part in _ALL:
        value = found[part]
        if isinstance(value, dict):
            rows = [f"    {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()]
            opening, closing = "{", "}"
        else:
            rows = [f"    {json.dumps(name)}" for name in value]
            opening, closing = "[", "]"
        lines.append(f"  {json.dumps(part)}: {opening}\n" + ",\n".join(rows) + f"\n  {closing}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    missing = [version for version in releases.TESTED if releases.here(version) is None]
    if missing:
        sys.exit(f"fetch these releases first: padtrace releases fetch {' '.join(missing)}")
    packages = [Path(str(releases.here(version))) / "sglang" for version in releases.TESTED]
    TARGET.write_text(as_text(server_arguments(packages)))


if __name__ == "__main__":
    main()
