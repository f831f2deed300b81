"""A live SGLang server under `padtrace lab --record`, driven as a user drives it.

The command runs in a process of its own; requests go over HTTP to 127.0.0.1; Ctrl-C ends it. The
servers share two cores, so one runs at a time and each is started once per test run.
"""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from padtrace.errors import EnvironmentMissingError
from padtrace.lab.environment import free_port
from padtrace.replay import releases

EAGLE = (
    "--speculative-algorithm=EAGLE",
    "--speculative-num-steps=5",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=6",
)
READY = "The server is fired up and ready to roll!"
START_SECONDS = 240
END_SECONDS = 90


def need_release(version: str) -> str:
    """The version, or a skip that says how to get it."""
    try:
        found = releases.here(version)
    except EnvironmentMissingError:
        found = None
    if found is None:
        pytest.skip(f"SGLang {version} is not here: padtrace releases fetch {version}")
    return version


@dataclass
class LiveServer:
    """One run of a server under record: its command, its log, its answers, its recording."""

    folder: Path
    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    _ready: threading.Event = field(default_factory=threading.Event)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def recording(self) -> Path:
        files = sorted(self.folder.glob("*.safetensors"))
        assert len(files) == 1, f"{files} after\n{self.log[-3000:]}"
        return files[0]

    def follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if READY in line:
                self._ready.set()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        # Without its warm-up SGLang says it is ready before it listens.
        while not (self._ready.wait(0.2) and self._listens()):
            assert self.process.poll() is None, f"it died:\n{self.log[-5000:]}"
            assert time.monotonic() < deadline, f"not ready:\n{self.log[-5000:]}"

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
            return False
        return True

    def ask(self, prompt_tokens: Sequence[int], new_tokens: int = 8) -> None:
        """One request for each length, all at once; every one must be answered."""
        with concurrent.futures.ThreadPoolExecutor(len(prompt_tokens)) as pool:
            self.answers += pool.map(lambda n: self._generate(n, new_tokens), prompt_tokens)

    def _generate(self, tokens: int, new_tokens: int) -> dict[str, Any]:
        body = {
            "input_ids": list(range(5, 5 + tokens)),
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def interrupt(self) -> int:
        """Ctrl-C, as a user ends `padtrace record`; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self, timeout: float = END_SECONDS) -> int:
        return self.process.wait(timeout)


def start(
    folder: Path,
    sglang: str | Path,
    *,
    model: str = "dsa",
    tp: int,
    dp: int,
    options: Sequence[str] = (),
    server_arguments: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> LiveServer:
    """Start the command on a release that is here, or on a folder that holds sglang.

    The server is not ready yet when this returns.
    """
    if isinstance(sglang, str):
        need_release(sglang)
    port = free_port()
    command = [
        sys.executable, "-P", "-m", "padtrace", "lab", "--record", f"--model={model}", f"--tp={tp}",
        f"--dp={dp}", f"--sglang={sglang}", f"--port={port}", f"--out={folder}",
        *options, "--", *server_arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=cwd,
        start_new_session=True,
    )
    server = LiveServer(folder, process, port)
    threading.Thread(target=server.follow, daemon=True).start()
    return server


def end(server: LiveServer) -> None:
    """Whatever a test left running."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGINT)
        try:
            server.wait()
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.wait()
