"""FlashMLA calls offline: the real kernels on CUDA, an exact reference everywhere.

Only the replay worker imports this package, because it imports torch. Start at
:func:`padtrace.replay.kernels.select.select` (which kernel) and
:func:`padtrace.replay.kernels.launch.run_launch` (one recorded launch).
"""
