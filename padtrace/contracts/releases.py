"""Order of SGLang releases, for signatures and tolerances that hold for some of them."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version


def in_range(release: object, first: str | None, last: str | None, *, unknown: bool = True) -> bool:
    """Whether a release lies in a range, ends included.

    A post release of an end (`0.5.17.post1`) is that release with fixes, and lies within; a release
    candidate of the first end lies before it.

    Args:
        unknown: the answer for what is no version, such as a checkout.
    """
    number = parsed(release)
    if number is None:
        return unknown
    return (first is None or Version(first) <= number) and (
        last is None or number <= Version(last) or number.release == Version(last).release
    )


def parsed(release: object) -> Version | None:
    """The version a text names, or None."""
    if not isinstance(release, str):
        return None
    try:
        return Version(release)
    except InvalidVersion:
        return None


def release_key(release: str) -> tuple[bool, Version, str]:
    """Key to sort by: versions in their order, then what is none by name."""
    number = parsed(release)
    return (number is None, number or Version("0"), release)
