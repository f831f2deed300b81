"""The kernel process, with the reference in the place of a real kernel: answers and ends."""

# ruff: noqa: E402 - the skip comes before the imports that need torch

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="the kernel reference needs torch")

from padtrace.errors import BadRecordingError, EnvironmentMissingError, UsageError
from padtrace.replay import protocol
from padtrace.replay.kernels import kernel_process, process
from padtrace.replay.kernels.cuda_state import cuda_reason
from padtrace.replay.kernels.kernel_process import KernelProcess
from padtrace.replay.kernels.launch import LaunchResult
from padtrace.replay.kernels.launch_shapes import LaunchLimits, LaunchShapes
from padtrace.replay.kernels.messages import MAX_FRAME_BYTES, Available, Judged, Launch
from padtrace.replay.kernels.reference.kernel import ReferenceKernel
from padtrace.replay.worker import launches

SHAPES_ONLY = LaunchLimits(max_work=0)
# A process that answers by the first dimension of q: what a library may do to its process.
UNRULY = """
import os, signal, sys, time
from padtrace.replay import protocol
from padtrace.replay.kernels.messages import Available, Judged, Launch

incoming, outgoing = protocol.take_streams()
protocol.send(outgoing, Available(name="unruly", reason=""))
while True:
    rows = protocol.receive(incoming, Launch).shapes.q_rows
    if rows == 1:
        os.write(1, b"Assertion failed: params.d == 576\\n")
        os._exit(1)
    if rows == 2:
        os.kill(os.getpid(), signal.SIGABRT)
    if rows == 3:
        time.sleep(60)
    if rows == 4:
        protocol.send(outgoing, protocol.Stop())
    if rows == 5:
        outgoing.write((1 << 40).to_bytes(8, "little"))
        outgoing.flush()
    protocol.send(outgoing, Judged(
        kernel="unruly", outcome="refused" if rows == 6 else "pass", stage=None,
        error=str(os.getpid()), raw_error=None, q_rows=rows, num_splits_rows=None,
        num_splits=None, computed=False, hazards=(), last=rows == 6))
"""


def dsa(rows: int, splits: int) -> LaunchShapes:
    return LaunchShapes(
        (rows, 1, 64, 576),
        num_splits_rows=splits,
        cache_seqlens_rows=splits - 1,
        indices_shape=(rows, 1, 128),
        block_table_shape=(rows, 0),
    )


@pytest.fixture(scope="module")
def reference() -> Iterator[KernelProcess]:
    started = KernelProcess("reference", "0.5.17", launch_seconds=60)
    yield started
    started.close()


@pytest.fixture
def unruly() -> Iterator[KernelProcess]:
    command = [sys.executable, "-c", UNRULY]
    started = KernelProcess("cuda", "0.5.17", command=command, launch_seconds=60)
    yield started
    started.close()


def test_a_mismatch_is_refused_and_the_same_process_goes_on(reference: KernelProcess) -> None:
    pid = reference.pid
    refused = reference.run(dsa(6, 9), limits=SHAPES_ONLY)
    # The C++ check of FlashMLA, as issue #34443 quotes it.
    assert (refused.outcome, refused.stage) == ("refused", "decode")
    assert refused.error == "num_splits must have shape (b+1)"
    assert (refused.q_rows, refused.num_splits_rows, refused.num_splits_expected) == (6, 9, 7)
    passed = reference.run(dsa(6, 7), limits=SHAPES_ONLY)
    assert (passed.outcome, passed.error, reference.pid) == ("pass", None, pid)
    assert passed.num_splits is not None
    assert (len(passed.num_splits), passed.num_splits[0]) == (7, 0)
    assert passed.kernel == reference.name
    assert reference.name.startswith("reference (")


def test_a_launch_that_cannot_be_is_refused_before_it_is_sent(reference: KernelProcess) -> None:
    with pytest.raises(BadRecordingError, match="a dimension of q_shape is -1"):
        reference.run(LaunchShapes((-1, 1, 64, 576)))
    with pytest.raises(BadRecordingError, match="its arguments take"):
        reference.run(LaunchShapes((1 << 20, 1 << 20, 64, 576)))
    assert reference.run(dsa(2, 3), limits=SHAPES_ONLY).outcome == "pass"


def test_killed_in_mid_launch_then_a_fresh_process(reference: KernelProcess) -> None:
    pid = reference.pid
    # Stopped, it cannot answer before it is killed.
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    result = reference.run(dsa(6, 7), limits=SHAPES_ONLY)
    assert result.outcome == "interrupted"
    assert result.error is not None
    assert result.error.startswith("the kernel process ended: killed from outside by SIGKILL")
    assert (result.q_rows, result.num_splits_rows, result.num_splits) == (6, 7, None)
    assert reference.run(dsa(6, 9), limits=SHAPES_ONLY).outcome == "refused"
    assert reference.pid != pid


def test_exit_and_abort_of_the_library_end_one_launch_each(unruly: KernelProcess) -> None:
    left = unruly.run(dsa(1, 2))
    assert left.outcome == "ended"
    assert left.error == (
        "the kernel process ended: exit code 1; Assertion failed: params.d == 576"
    )
    aborted = unruly.run(dsa(2, 3))
    assert aborted.outcome == "ended"
    assert aborted.error == "the kernel process ended: by SIGABRT; it wrote nothing"
    assert unruly.run(dsa(8, 9)).outcome == "pass"


@pytest.mark.parametrize(
    ("rows", "why"), [(4, "Invalid value 'stop'"), (5, "a frame claims 1099511627776 bytes")]
)
def test_an_answer_that_is_none(unruly: KernelProcess, rows: int, why: str) -> None:
    result = unruly.run(dsa(rows, rows + 1))
    assert result.outcome == "interrupted"
    assert "its answer is no message" in str(result.error)
    assert why in str(result.error)
    assert unruly.run(dsa(8, 9)).outcome == "pass"


def test_a_kernel_that_hangs_is_interrupted() -> None:
    command = [sys.executable, "-c", UNRULY]
    hanging = KernelProcess("cuda", "0.5.17", command=command, launch_seconds=0.3)
    result = hanging.run(dsa(3, 4))
    hanging.close()
    assert result.outcome == "interrupted"
    assert "no answer within 0.3 seconds" in str(result.error)


def test_after_a_lost_context_comes_a_fresh_process(unruly: KernelProcess) -> None:
    first, lost, third = (unruly.run(dsa(rows, rows + 1)) for rows in (8, 6, 8))
    assert (first.outcome, lost.outcome, third.outcome) == ("pass", "refused", "pass")
    assert first.error == lost.error != third.error


def test_it_is_not_started_without_end(
    unruly: KernelProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_process, "_MAX_ENDS", 1)
    assert unruly.run(dsa(2, 3)).outcome == "ended"
    result = unruly.run(dsa(8, 9))
    assert result.outcome == "not-called"
    assert result.error == "1 launches ended the kernel process before"
    unruly.begin()
    assert unruly.run(dsa(8, 9)).outcome == "pass"


def test_a_process_that_does_not_start_is_missing() -> None:
    command = [sys.executable, "-c", "raise ImportError('libcudart.so.12: not found')"]
    with pytest.raises(EnvironmentMissingError) as missing:
        KernelProcess("cuda", "0.5.17", command=command)
    assert missing.value.what == "the kernel process does not start"
    assert "exit code 1" in missing.value.why
    assert "ImportError: libcudart.so.12: not found" in missing.value.why


@pytest.mark.skipif(not cuda_reason(), reason="CUDA works here")
def test_cuda_without_a_gpu_says_why() -> None:
    with pytest.raises(EnvironmentMissingError) as missing:
        launches.LaunchJudge("cuda", "0.5.17", launches.RealKernels())
    assert missing.value.exit_code == 4
    assert cuda_reason() in missing.value.why
    judge = launches.LaunchJudge("auto", "0.5.17", launches.RealKernels())
    assert judge.summary()["name"] is None
    result = judge.judge({"q.shape": [6, 1, 64, 576], "num_splits.rows": 9})
    assert result is not None
    assert (result.outcome, result.error) == ("refused", "num_splits must have shape (b+1)")
    summary = judge.summary()
    assert summary["name"].startswith("reference (")
    assert summary["why"] == cuda_reason()
    assert summary["outcomes"] == {"refused": 1}


class Started(launches.RealKernels):
    """Gives the process of a test."""

    def __init__(self, started: KernelProcess) -> None:
        super().__init__()
        self.started = started

    def get(self, version: str) -> KernelProcess:
        return self.started


def test_the_judge_tells_an_ended_process_as_refusal_and_counts_it(unruly: KernelProcess) -> None:
    judge = launches.LaunchJudge("cuda", "0.5.17", Started(unruly))
    found = [judge.judge({"q.shape": [rows, 1, 64, 576]}) for rows in (1, 8, 8, 4)]
    told = [None if one is None else one.outcome for one in found]
    assert told == ["refused", "pass", "pass", "interrupted"]
    assert judge.summary()["outcomes"] == {"ended": 1, "pass": 2, "interrupted": 1}
    ended, interrupted = judge.summary()["without_answer"]
    assert "Assertion failed: params.d == 576" in ended
    assert "no message" in interrupted


@pytest.mark.parametrize("arguments", [[], ["auto", "0.5.17"], ["off", "0.5.17"], ["cuda"]])
def test_other_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="the kernel process was started with"):
        process._kernel(arguments)


def test_what_is_no_launch_is_refused_by_the_process() -> None:
    incoming = io.BytesIO((MAX_FRAME_BYTES + 1).to_bytes(8, "little"))
    outgoing = io.BytesIO()
    assert process.serve(ReferenceKernel(), incoming, outgoing) == 2
    outgoing.seek(0)
    assert protocol.receive(outgoing, Available).name == ReferenceKernel().name
    failed = protocol.receive(outgoing, protocol.Failed)
    assert (failed.error, failed.what) == ("UsageError", "the kernel process was sent no launch")
    assert f"a frame claims {MAX_FRAME_BYTES + 1} bytes" in failed.why


def result_with(**changes: object) -> LaunchResult:
    given = {
        "kernel": "k", "outcome": "pass", "stage": None, "error": None, "raw_error": None,
        "q_rows": 1, "num_splits_rows": 2, "num_splits": (0, 1), "computed": False, **changes,
    }  # fmt: skip
    return LaunchResult(**given)  # type: ignore[arg-type]


def sent(message: msgspec.Struct, kind: type[msgspec.Struct]) -> msgspec.Struct:
    return protocol.receive(_stream(message), kind)


def _stream(message: msgspec.Struct) -> io.BytesIO:
    stream = io.BytesIO()
    protocol.send(stream, message)
    stream.seek(0)
    return stream


def test_texts_are_cut_and_numbers_are_bounded() -> None:
    long = Judged.of(result_with(error="x" * 10_000, raw_error="y" * 10_000), last=False)
    assert len(sent(long, Judged).error) == 4096
    for wrong in ({"num_splits": (1 << 31,)}, {"q_rows": -1}, {"outcome": "fine"},
                  {"num_splits": (0,) * ((1 << 20) + 2)}):  # fmt: skip
        with pytest.raises(msgspec.ValidationError):
            sent(Judged.of(result_with(**wrong), last=False), Judged)


def test_the_largest_launch_fits_a_frame() -> None:
    most = [(1 << 31) - 1] * (1 << 20)
    launch = Launch(
        shapes=LaunchShapes(
            (1 << 20, 1, 64, 576), num_splits=most, cache_seqlens=most, topk_length=most
        )
    )
    assert len(_stream(launch).getvalue()) < MAX_FRAME_BYTES
