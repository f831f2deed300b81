"""A release with one function changed, as somebody's branch would be."""

from __future__ import annotations

import shutil
from pathlib import Path

from padtrace.replay import releases
from tests.live.servers import need_release

_PLANNER = Path("sglang/srt/layers/attention/dsa/utils.py")
_COUNTS = "    global_num_tokens = forward_batch.global_num_tokens_cpu.copy()\n"
# What sglang#30642 proposes: the plan aligns to attention TP as the pad does.
_ALIGNED = (
    "    attn_tp_size = get_parallel().attn_tp_size\n"
    "    global_num_tokens = [ceil_align(count, attn_tp_size) for count in global_num_tokens]\n"
)


def with_30642(version: str, folder: Path) -> Path:
    """A copy of the release, links but for the one file, whose plan is aligned to attention TP."""
    need_release(version)
    release = releases.here(version)
    assert release is not None
    shutil.copytree(
        release / "sglang",
        folder / "sglang",
        copy_function=_link,
        ignore=_no_bytecode,
        symlinks=True,
    )
    for info in release.glob("sglang-*.dist-info"):
        shutil.copytree(info, folder / info.name)
    planner = folder / _PLANNER
    source = planner.read_text()
    assert source.count(_COUNTS) == 1, "this release plans in another way"
    planner.unlink()
    planner.write_text(source.replace(_COUNTS, _COUNTS + _ALIGNED))
    return folder


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)


def _no_bytecode(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__"}
