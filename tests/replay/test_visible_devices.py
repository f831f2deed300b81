"""What the command saw of GPUs, through the worker to the kernel process."""

from __future__ import annotations

import pytest

from padtrace.replay import service, visible_devices
from padtrace.replay.worker import obstacles


@pytest.mark.parametrize("outer", [None, "", "0", "2,3", "GPU-8932f937"])
def test_the_kernel_process_sees_what_the_command_saw(
    outer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADTRACE_OUTER_CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    worker = service._environment()
    worker.update(obstacles._ENVIRONMENT)
    assert worker["CUDA_VISIBLE_DEVICES"] == ""
    visible_devices.restore(worker)
    assert worker.get("CUDA_VISIBLE_DEVICES") == outer
    assert "PADTRACE_OUTER_CUDA_VISIBLE_DEVICES" not in worker
