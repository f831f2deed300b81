"""The card the reference imitates: the schedule depends on its SM count and architecture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    """What FlashMLA asks of ``cudaDeviceProp`` (``struct Arch``, csrc/api/common.h).

    Attributes:
        name: for reports.
        major: compute capability, first number.
        minor: compute capability, second number.
        num_sms: streaming multiprocessors.
    """

    name: str
    major: int
    minor: int
    num_sms: int

    @property
    def is_sm90a(self) -> bool:
        """Hopper."""
        return self.major == 9 and self.minor == 0

    @property
    def is_sm100f(self) -> bool:
        """Blackwell data centre."""
        return self.major == 10


H100 = GpuModel("H100 SXM", 9, 0, 132)
H200 = GpuModel("H200", 9, 0, 132)
H20 = GpuModel("H20", 9, 0, 78)
B200 = GpuModel("B200", 10, 0, 148)

DEFAULT_GPU = H200
