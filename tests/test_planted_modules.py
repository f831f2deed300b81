"""Nothing that lies around is executed: not in the working directory, not in the temp folder, not
beside the recording.

Modules that leave a mark when they are imported are planted in all three, under the names of what
padtrace and its children import. Each command that starts another process must start it, which the
stand-in SGLang tells, and leave no mark. The commands run with -P, as the installed script does
without it; whether that reaches the children is what is tested.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from padtrace.errors import EnvironmentMissingError
from padtrace.recording.reader import read
from padtrace.replay import environments, releases
from padtrace.replay.kernels.kernel_process import KernelProcess
from tests.replay.test_releases import _wheel

ROOT = Path(__file__).resolve().parent.parent
CRASH = ROOT / "recordings" / "crash.safetensors"
RELEASE = "0.5.18"
NAMES = (
    *("msgspec", "numpy", "torch", "json", "sitecustomize", "usercustomize", "sglang", "padtrace"),
    *(
        "pip",
        "safetensors",
        "rich",
        "typer",
        "transformers",
        "zmq",
        "venv",
        "ensurepip",
        "requests",
    ),
)
PLANTED = "import os, sys\nopen(os.path.join({marks!r}, {name!r} + '-' + str(os.getpid())), 'w')\n"
# What an SGLang that is executed tells of the process it runs in.
TELLS = """
import json, os, stat, sys
told = {{
    "path": sys.path, "folder": os.getcwd(), "mode": stat.S_IMODE(os.stat(".").st_mode),
    "beside": os.listdir("."), "safe": [sys.flags.safe_path, os.environ.get("PYTHONSAFEPATH")],
}}
open({told!r}, "a").write(json.dumps(told) + "\\n")
"""

needs_packages = pytest.mark.skipif(
    bool(environments.missing_packages()),
    reason="this interpreter lacks what SGLang imports: "
    + " ".join(environments.missing_packages()),
)


@dataclass
class Trap:
    """The three planted folders, a folder of releases, and how to run a command among them."""

    root: Path

    @property
    def folders(self) -> list[Path]:
        return [self.root / name for name in ("work", "temp", "beside")]

    @property
    def work(self) -> Path:
        return self.folders[0]

    @property
    def recording(self) -> Path:
        return self.root / "beside" / "crash.safetensors"

    def set(self) -> None:
        (self.root / "marks").mkdir(parents=True)
        for folder in self.folders:
            for name in NAMES:
                source = PLANTED.format(
                    marks=str(self.root / "marks"), name=f"{folder.name}-{name}"
                )
                (folder / name).mkdir(parents=True)
                for file in ("__init__.py", "__main__.py"):
                    (folder / name / file).write_text(source)
        shutil.copy(CRASH, self.recording)
        package = self.root / "releases" / RELEASE / "sglang"
        (package / "srt").mkdir(parents=True)
        (package / "srt" / "__init__.py").write_text("")
        (package / "__init__.py").write_text("")
        tells = TELLS.format(told=str(self.root / "told"))
        (package / "launch_server.py").write_text(tells)
        (package / "srt" / "model_executor").mkdir()
        (package / "srt" / "model_executor" / "__init__.py").write_text(
            f"{tells}\nraise ImportError('so far and no further')\n"
        )

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PADTRACE"))}
        given = {
            "TMPDIR": str(self.root / "temp"),
            "PADTRACE_RELEASES": str(self.root / "releases"),
        }
        return {**kept, **given, "PYTHONDONTWRITEBYTECODE": "1", **more}

    def run(self, *command: object, **more: str) -> subprocess.CompletedProcess[str]:
        first = str(command[0])
        start = ["-P", "-m", "padtrace"] if not first.endswith(".py") else ["-P"]
        return subprocess.run(
            [sys.executable, *start, *map(str, command)],
            cwd=self.work,
            env=self.environment(**more),
            capture_output=True,
            text=True,
            check=False,
        )

    def check(self, *, told: bool = True) -> None:
        """Nothing planted ran; what was to run did, in a private folder that is gone."""
        assert sorted(path.name for path in (self.root / "marks").iterdir()) == []
        for folder in self.folders:
            extra = {path.name for path in folder.iterdir()} - {*NAMES, self.recording.name}
            assert not extra - {"lab.log", "recordings"}, f"left in {folder.name}: {extra}"
        if not told:
            return
        lines = (self.root / "told").read_text().splitlines()
        assert lines
        for line in lines:
            self.check_told(json.loads(line))

    def check_told(self, told: dict[str, Any]) -> None:
        assert told["safe"] == [True, "1"]
        assert told["mode"] == stat.S_IRWXU
        assert told["beside"] == []
        assert Path(told["folder"]).parent == self.root / "temp"
        assert not Path(told["folder"]).exists()
        shadowed = {str(folder) for folder in self.folders} | {"", ".", told["folder"]}
        assert not shadowed & set(told["path"])


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    made = Trap(tmp_path)
    made.set()
    return made


def test_the_trap_catches(trap: Trap) -> None:
    """What is planted does run where nothing is done about it."""
    subprocess.run(
        [sys.executable, "-c", "import msgspec"], cwd=trap.work, env=trap.environment(), check=True
    )
    subprocess.run(
        [sys.executable, "-m", "pip"], cwd=trap.root / "temp", env=trap.environment(), check=True
    )
    marks = {path.name.rpartition("-")[0] for path in (trap.root / "marks").iterdir()}
    assert marks == {"work-msgspec", "temp-pip"}


@needs_packages
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("replay", "RECORDING"), 4),
        (("replay", "RECORDING", "--jobs", "2", "--sglang", RELEASE), 4),
        (("across", "RECORDING", "--releases", RELEASE), 4),
        (("doctor", "--sglang", RELEASE), 4),
        ((ROOT / "scripts" / "corpus.py", RELEASE), 1),
    ],
    ids=["replay", "replay in shares", "across", "doctor", "corpus"],
)
def test_what_starts_a_worker(trap: Trap, command: tuple[object, ...], code: int) -> None:
    given = [trap.recording if part == "RECORDING" else part for part in command]
    done = trap.run(*given)
    assert done.returncode == code, done.stderr
    assert "so far and no further" in done.stderr + done.stdout
    trap.check()


@needs_packages
@pytest.mark.release
def test_a_whole_replay_through_a_real_release(trap: Trap) -> None:
    place = releases.here(RELEASE)
    if place is None:
        pytest.skip(f"SGLang {RELEASE} is not here: padtrace releases fetch {RELEASE}")
    done = trap.run("replay", trap.recording, PADTRACE_RELEASES=str(place.parent))
    # The verdict of the shipped recording.
    assert done.returncode == 1, done.stderr
    trap.check(told=False)


@needs_packages
def test_the_sglang_of_this_interpreter_is_not_one_that_lies_around(trap: Trap) -> None:
    done = trap.run("doctor")
    assert str(trap.root) not in done.stdout
    trap.check(told=False)


def test_the_kernel_process(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the kernel reference needs torch")
    monkeypatch.chdir(trap.work)
    monkeypatch.setattr(tempfile, "tempdir", str(trap.root / "temp"))
    monkeypatch.setenv("PYTHONPATH", str(trap.work))
    process = KernelProcess("reference", "0.5.17")
    process.close()
    trap.check(told=False)


def test_fetching_and_verifying_a_release(trap: Trap) -> None:
    (trap.root / "index").mkdir()
    _wheel(trap.root / "index")
    pip = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1"}
    more = {**pip, "PIP_FIND_LINKS": str(trap.root / "index")}
    cache = {"PADTRACE_CACHE": str(trap.root / "cache")}
    for action in ("fetch", "verify"):
        done = trap.run("releases", action, "9.9.9", **more, **cache)
        assert done.returncode == 0, done.stderr
    trap.check(told=False)


def test_making_an_environment(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trap.work)
    monkeypatch.setattr(tempfile, "tempdir", str(trap.root / "temp"))
    for name, value in {
        "PYTHONPATH": str(trap.work), "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1",
        "PADTRACE_CACHE": str(trap.root / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    said: list[str] = []
    with pytest.raises(EnvironmentMissingError, match="torch"):
        environments._make(trap.root / "env", trap.root / "env" / "bin" / "python", said.append)
    assert any("installing torch" in text for text in said)
    trap.check(told=False)


@pytest.mark.parametrize("how", ["--no-record", "--record"])
def test_the_lab_s_server(trap: Trap, how: str) -> None:
    done = trap.run("lab", "--sglang", RELEASE, "--model", "dense", how)
    # It ends as soon as it was started: no server, and nothing recorded.
    assert done.returncode == (4 if how == "--no-record" else 0), done.stderr
    trap.check()


def test_the_recorded_server_is_the_user_s_own(trap: Trap) -> None:
    """It keeps the folder and the path it has without padtrace, or a relative path breaks."""
    own = trap.root / "own"
    shutil.copytree(trap.root / "releases" / RELEASE / "sglang", own / "sglang")
    out = trap.root / "out"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "padtrace", "record", "--out", str(out)],
        cwd=own,
        env=trap.environment(PYTHONPATH="relative"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((trap.root / "told").read_text())
    assert told["folder"] == str(own)
    assert told["path"][:2] == [str(own), str(own / "relative")]
    assert told["safe"] == [False, None]
    assert list(out.iterdir()) == []


def test_a_recording_names_a_version_or_nothing(trap: Trap) -> None:
    """Of the 0.5.18 that lies in the working directory nothing runs either."""
    shutil.copytree(trap.work / "sglang", trap.work / RELEASE / "sglang")
    (trap.work / RELEASE / "sglang" / "srt").mkdir()
    assert read(trap.recording).about["sglang"] == RELEASE
    empty = {"PADTRACE_RELEASES": "", "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1"}
    cache = {"PADTRACE_CACHE": str(trap.root / "cache")}
    for arguments in ((), ("--sglang", RELEASE)):
        done = trap.run("replay", trap.recording, *arguments, **empty, **cache)
        assert done.returncode == 4
        assert f"sglang=={RELEASE} could not be fetched" in done.stderr
    assert list((trap.root / "marks").iterdir()) == []
