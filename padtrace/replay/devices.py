"""The devices that a replay can show SGLang, and which one a recording asks for."""

from __future__ import annotations

from typing import Any

CPU, HIP = "cpu", "hip"
DEVICES = (CPU, "sm90", "sm100", HIP)

_BY_CAPABILITY = {9: "sm90", 10: "sm100"}
# What a server that says nothing of its card most likely had.
ASSUMED = "sm90"


def shown_device(facts: list[dict[str, Any]], asked: str | None) -> tuple[str, str]:
    """The device to show for a recording, and what is assumed about it ("" for nothing).

    Args:
        facts: of its processes.
        asked: what the user asked for; it goes before what was recorded.
    """
    if asked is not None:
        return asked, ""
    for one in facts:
        made = _made(one)
        if made is not None:
            return made, ""
        device = one.get("device")
        if isinstance(device, dict) and device.get("type") is not None:
            return _recorded(device)
    return ASSUMED, f"the recording does not say on what device it was made: {ASSUMED} is shown"


def _made(facts: dict[str, Any]) -> str | None:
    """The device of a made recording: its own key, or a CPU."""
    case = facts.get("case")
    if not isinstance(case, dict):
        return None
    device = case.get("device")
    return device if isinstance(device, str) else CPU


def _recorded(device: dict[str, Any]) -> tuple[str, str]:
    kind, capability = device.get("type"), device.get("capability")
    if kind == "cpu":
        return CPU, ""
    if device.get("hip") or kind == "hip":
        return HIP, ""
    if isinstance(capability, list) and capability and capability[0] in _BY_CAPABILITY:
        return _BY_CAPABILITY[capability[0]], ""
    told = f"capability {capability}" if capability else "no capability"
    return ASSUMED, f"the recording names a {kind} device with {told}: {ASSUMED} is shown"
