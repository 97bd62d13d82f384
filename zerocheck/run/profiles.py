"""Profiles: how many cases a run has, and over which world sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How thorough a run is. cases: per implementation; world_sizes: the default ones."""

    name: str
    cases: int
    world_sizes: tuple[int, ...]
    summary: str


_SIZES = (1, 2, 3, 4, 5, 8)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(name="quick", cases=48, world_sizes=_SIZES, summary="before a commit"),
        Profile(name="ci", cases=120, world_sizes=_SIZES, summary="on every change, in CI"),
        Profile(name="thorough", cases=600, world_sizes=_SIZES, summary="before a release"),
    )
}
