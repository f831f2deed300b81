"""The arrows between the folders of padtrace, held against the imports that are really there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "padtrace"

# Folder (or file) -> folders of padtrace it may import. `errors`, `one_line` and the version are
# free for all.
ALLOWED = {
    "one_line": set(),
    "errors": set(),
    "children": set(),
    "recording": {"recording"},
    "contracts": {"contracts", "recording"},
    "sharing": {"sharing", "recording"},
    "record": {"record", "recording", "sharing", "contracts/rows", "children"},
    # Its worker drives SGLang with the recorder's own probes around it.
    "replay": {
        *("replay", "recording", "children"),
        *("record", "record/hooks", "record/install", "record/state"),
        *("record/targets", "record/wire", "record/probes/context"),
    },
    "lab": {"lab", "children"},
    "explore": {"explore", "replay", "contracts", "recording", "children"},
    "report": {"report", "explore", "contracts", "recording", "sharing"},
    "cli": {
        "cli",
        "explore",
        "report",
        "record",
        "lab",
        "replay",
        "contracts",
        "recording",
        "children",
        "sharing",
    },
}
# Folders of which only the named files may be imported.
IN_PART = {"replay": ("record",)}
# What runs inside somebody's server, and what it may import of ours.
INSIDE_SERVER = {
    "record/plugin", "record/targets", "record/hooks", "record/state", "record/snapshots",
    "record/values", "record/probes", "record/install", "record/start", "record/failures",
    "record/imports", "record/ring_format", "record/ring_file", "record/ring_folder",
    "record/filesystems", "record/shared_memory", "record/facts_collector",
    "record/alarm", "record/ring", "record/wire", "record/native", "record/ring_core",
    "record/state_core", "record/settings", "record/device_values", "record/plain_log",
    "sharing/kept", "sharing/rule", "sharing/names", "sharing/redact", "sharing/messages",
}  # fmt: skip
FOLDERS = ("record", "recording", "contracts", "sharing")
SERVER_MAY_IMPORT = {"recording/schema", "recording/absent", "recording/facts", "contracts/rows"}
HEAVY = {"torch", "sglang", "sgl_kernel", "flash_mla", "triton", "transformers"}
HEAVY_ALLOWED = ("record/", "lab/", "replay/worker", "replay/kernels/")


def _modules() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if "lab/site" not in str(path)]


def _place(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix("")).removesuffix("/__init__")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            module = node.module or ""
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def _ours(path: Path) -> set[str]:
    """Places of padtrace that a module imports, as `folder/file`."""
    places = set()
    for name in _imports(path):
        if not name.startswith("padtrace."):
            continue
        place = name.removeprefix("padtrace.").replace(".", "/")
        while not ((ROOT / f"{place}.py").exists() or (ROOT / place).is_dir()):
            place = place.rpartition("/")[0]
        places.add(place)
    return places - {"", "errors", "one_line"}


@pytest.mark.parametrize("path", _modules(), ids=_place)
def test_imports_follow_the_arrows(path: Path) -> None:
    home = _place(path).split("/")[0]
    if home in ("__init__", "__main__"):
        return
    allowed = ALLOWED[home]
    for place in _ours(path):
        whole = allowed - set(IN_PART.get(home, ()))
        assert place.split("/")[0] in whole or place in allowed, f"{home} imports {place}"


@pytest.mark.parametrize("path", _modules(), ids=_place)
def test_torch_and_sglang_stay_where_they_belong(path: Path) -> None:
    place = _place(path)
    heavy = {name.split(".")[0] for name in _imports(path)} & HEAVY
    if heavy:
        assert place.startswith(HEAVY_ALLOWED), f"{place} imports {sorted(heavy)}"


@pytest.mark.parametrize("path", _modules(), ids=_place)
def test_what_runs_in_a_server_is_small(path: Path) -> None:
    place = _place(path)
    if not any(place == inside or place.startswith(f"{inside}/") for inside in INSIDE_SERVER):
        return
    outside = {
        name
        for name in _ours(path)
        if name not in SERVER_MAY_IMPORT and name not in FOLDERS
        and not any(name == inside or name.startswith(f"{inside}/") for inside in INSIDE_SERVER)
    }  # fmt: skip
    assert not outside, f"{place} imports {sorted(outside)}"
    assert "numpy" not in {name.split(".")[0] for name in _imports(path)}


def _reached(place: str) -> set[str]:
    """Every place of ours that an import of this one brings in, sooner or later."""
    reached: set[str] = set()
    waiting = {place}
    while waiting:
        place = waiting.pop()
        reached.add(place)
        path = ROOT / f"{place}.py"
        if not path.exists():
            path = ROOT / place / "__init__.py"
        if path.exists():
            waiting |= _ours(path) - reached
    return reached


@pytest.mark.parametrize("inside", [*sorted(INSIDE_SERVER), "lab/plugin", "lab/standins"])
def test_no_server_starts_processes_of_ours(inside: str) -> None:
    place = inside if (ROOT / f"{inside}.py").exists() else None
    places = [place] if place else [_place(path) for path in sorted((ROOT / inside).glob("*.py"))]
    assert places
    for place in places:
        assert "children" not in _reached(place), f"{place} reaches children"


def test_processes_are_started_in_one_place() -> None:
    starters = {_place(path) for path in _modules() if "subprocess" in _imports(path)}
    assert starters == {"children"}
