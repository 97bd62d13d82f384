"""Implementations of installed packages: entry points of the group `zerocheck.implementations`.

Nothing of a package is imported here: its code runs in ranks, where it is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import NamedTuple

GROUP = "zerocheck.implementations"
TAKEN = (".py", ".json")
"""Ends of names that are paths."""


class InstalledImplementation(NamedTuple):
    """Entry point: its name, `package.module:Name`, and the package that declares it."""

    name: str
    place: str
    package: str


@cache
def installed() -> dict[str, tuple[InstalledImplementation, ...]]:
    """Return the entry points by name; several where packages disagree."""
    found: dict[str, tuple[InstalledImplementation, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda one: (one.name, one.value)):
        package = "" if point.dist is None else point.dist.name
        place = point.value.partition("[")[0].strip()
        one = InstalledImplementation(point.name, place, package)
        found[one.name] = (*found.get(one.name, ()), one)
    return found


def refusal(name: str, taken: bool) -> str | None:
    """Return the reason why the entry point of this name cannot be used, or None.

    taken: a built-in implementation has the name.
    """
    points = installed().get(name, ())
    if not points:
        return None
    packages = " and ".join(f"{one.package} ({one.place})" for one in points)
    if taken:
        return f"{name!r} is built in, and an installed package has the same name: {packages}"
    if len(points) > 1:
        return f"{name!r} is the name of implementations of several packages: {packages}"
    if set(name) & set(":+/\\") or name.endswith(TAKEN):
        return f"{name!r} cannot be a name, it reads as a path or a fault: {packages}"
    module, _, attribute = points[0].place.partition(":")
    if not module or not attribute.isidentifier():
        return f"{name!r} is declared as {packages}; needed is package.module:Name"
    return None
