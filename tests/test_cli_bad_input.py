"""Bad files on the command line: one typed error, its exit code, little memory, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from padtrace.recording import writer
from tests.recording.helpers import small_recording
from tests.recording.test_file import HOSTILE

MEMORY_KIB = 200 * 1024
# VmHWM and not ru_maxrss, which a child inherits from the process that started it.
PROGRAM = """
import re
from padtrace.cli import main
try:
    main()
finally:
    print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
WHOLE = writer.to_bytes(small_recording())
FILES: dict[str, bytes | None] = {
    **{name: data for name, (data, _) in HOSTILE.items()},
    "missing": None,
    "truncated in its columns": WHOLE[:-7],
    "truncated in its header": WHOLE[:100],
    "a flipped byte in a column": WHOLE[:-1] + bytes([WHOLE[-1] ^ 1]),
}


@pytest.mark.parametrize("command", ["info", "check", "diff", "show", "replay"])
@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_refused_in_words(tmp_path: Path, name: str, command: str) -> None:
    path = tmp_path / "bad.safetensors"
    content = FILES[name]
    if content is not None:
        path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    peak = int(done.stdout.split()[-1])
    assert done.stdout.split()[:-1] == []
    assert peak < MEMORY_KIB
    assert done.returncode == 3, done.stderr
    lines = done.stderr.splitlines()
    assert 2 <= len(lines) <= 3, done.stderr
    assert lines[0].startswith("padtrace: bad recording: bad.safetensors")
    assert "Traceback" not in done.stderr
