"""A resumed case as what its ranks do one after the other: train, save, load, go on.

Leg 0 trains from the start; leg k loads what leg k - 1 saved, on other ranks.
"""

from __future__ import annotations

import msgspec

from .schema import Case


def legs_of(case: Case) -> list[Case]:
    """The case of each leg; one leg, the case itself, if nothing is resumed.

    `training.first` and `training.steps` of a leg are the indices of its first step and after its
    last; `resume` holds the legs that are still to come.
    """
    legs = [case]
    for number, leg in enumerate(case.resume):
        before = legs[-1].training.steps
        legs.append(
            msgspec.structs.replace(
                case,
                mesh=leg.mesh,
                training=msgspec.structs.replace(
                    case.training, first=before, steps=before + leg.steps
                ),
                resume=case.resume[number + 1 :],
            )
        )
    return legs


def in_background(case: Case) -> bool:
    """Whether the checkpoint that ends a leg is to be written while training goes on."""
    return bool(case.resume) and case.resume[0].background


def end_of(case: Case) -> int:
    """Index after the last step that a leg's ranks take.

    While a checkpoint is written in the background they take one step more than it holds.
    """
    return case.training.steps + in_background(case)


def only_loads(case: Case, number: int) -> bool:
    """Whether leg `number` of a case only tries to load what was killed or damaged."""
    leg = case.resume[number - 1]
    return leg.killed is not None or leg.damage != "none"


def samples_read(case: Case, steps: int) -> int:
    """Samples that all data-parallel ranks of a leg read in so many steps."""
    return case.readers * case.training.microbatches * case.data.batch * steps


def samples_before(case: Case, number: int) -> int:
    """Samples that were read when leg `number` begins."""
    return sum(
        samples_read(leg, leg.training.steps - leg.training.first) for leg in legs_of(case)[:number]
    )
