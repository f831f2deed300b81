"""The guard of newer releases that refuses an fp8 MLA cache on a CPU."""

from typing import Any

from padtrace.lab.standins.targets import module_if_present, replace


class _NotCpu:
    """The platform of this process, except that it does not say it is a CPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def install() -> None:
    """Hide the platform from the cache configurator alone: the CPU fp8 pool is for MHA only."""
    configurator = module_if_present("sglang.srt.mem_cache.kv_cache_configurator")
    if configurator is None or not hasattr(configurator, "current_platform"):
        return
    replace(configurator, "current_platform", _NotCpu(configurator.current_platform))
