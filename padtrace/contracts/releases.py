"""Order of SGLang releases, for signatures and tolerances that hold for some of them."""

from __future__ import annotations


def in_range(release: object, first: str | None, last: str | None) -> bool:
    """Whether a release lies in a range, ends included; one that is not known may lie anywhere."""
    if not isinstance(release, str) or not release[:1].isdigit():
        return True
    number = release_key(release)
    return (first is None or release_key(first) <= number) and (
        last is None or number <= release_key(last)
    )


def release_key(release: str) -> tuple[int, ...]:
    """`0.5.18.post1` as (0, 5, 18); a suffix does not change the order of releases."""
    parts: list[int] = []
    for part in release.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)
