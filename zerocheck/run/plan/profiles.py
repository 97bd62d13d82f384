"""Profiles: cases of a run, their number, and world sizes."""

from __future__ import annotations

from dataclasses import dataclass

from ...case.schema import MeshSizes


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Thoroughness of a run. cases: per implementation; world_sizes: the default ones.

    covering: the cases begin with a covering array of all pairs of features, however many that
    takes; what is left of `cases` is drawn at random; meshes: the default ones (R, S), of
    implementations that handle them: among those drawn at random they are as frequent, together, as
    one of the world sizes; resumed: cases with a checkpoint, where these are asked for;
    resumed_sizes: world sizes that save and load in them; each_fault_once: a known fault is shown
    by the own case of one implementation, not of each that has it.
    """

    name: str
    cases: int
    world_sizes: tuple[int, ...]
    meshes: tuple[MeshSizes, ...]
    summary: str
    resumed: int
    resumed_sizes: tuple[int, ...]
    covering: bool = False
    each_fault_once: bool = False


FIRST_LOOK = "smoke"
"""Name of the profile for all implementations together, which takes a minute on two idle cores."""

_FEW_SIZES = (1, 2, 3)
_SIZES = (1, 2, 3, 4, 5, 8)
_MORE_SIZES = (1, 2, 3, 4, 5, 7, 8, 16)
_MESHES: tuple[MeshSizes, ...] = ((2, 2), (2, 3), (3, 2), (2, 4), (1, 3), (3, 1))
_MORE_MESHES: tuple[MeshSizes, ...] = (*_MESHES, (4, 2), (1, 2), (2, 1), (3, 3))
_ALL_SIZES = tuple(range(1, 17))

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name=FIRST_LOOK,
            cases=12,
            world_sizes=_FEW_SIZES,
            meshes=((2, 2), (1, 3), (3, 1)),
            summary="a first look: what runs where no implementation is named",
            resumed=8,
            resumed_sizes=_FEW_SIZES,
            each_fault_once=True,
        ),
        Profile(
            name="quick",
            cases=48,
            world_sizes=_SIZES,
            meshes=_MESHES,
            summary="before a commit",
            resumed=24,
            resumed_sizes=_SIZES,
        ),
        Profile(
            name="ci",
            cases=100,
            world_sizes=_MORE_SIZES,
            meshes=_MORE_MESHES,
            summary="on every change, in CI",
            resumed=64,
            resumed_sizes=_ALL_SIZES,
            covering=True,
        ),
        Profile(
            name="thorough",
            cases=600,
            world_sizes=_MORE_SIZES,
            meshes=_MORE_MESHES,
            summary="before a release",
            resumed=256,
            resumed_sizes=_ALL_SIZES,
            covering=True,
        ),
    )
}
