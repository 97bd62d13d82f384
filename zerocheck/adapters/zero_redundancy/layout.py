"""Layout of DDP with ZeroRedundancyOptimizer: the parameters that each rank updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...case.schema import Case
from ...contract.groups import group_of
from ...protocol.layout import Phase
from ..ddp.layout import state_bytes
from ..shared.account import Account

EMPTY_BUCKET_BYTES = 4
"""One element of fp32."""


def assigned_names(case: Case, elements: Mapping[str, int]) -> list[list[str]]:
    """Return the names of the parameters that ZeroRedundancyOptimizer assigns to each rank.

    Group by group, the largest first, each goes to the rank that has the fewest elements so far.
    elements: those of each parameter that trains, now or later.
    """
    sums = [0] * case.world_size
    ranks: list[list[str]] = [[] for _ in sums]
    for group in range(len(case.optimizer.groups)):
        members = [name for name in elements if group_of(case, name) == group]
        for name in sorted(members, key=lambda one: -elements[one]):
            rank = sums.index(min(sums))
            ranks[rank].append(name)
            sums[rank] += elements[name]
    return ranks


def shared_out(account: Account, rank: int) -> set[str]:
    """Return the names of the parameters that a rank updates."""
    elements = {name: account.parameters[name].numel for name in account.ever()}
    return set(assigned_names(account.case, elements)[rank])


def dummies(account: Account, step: int, phase: Phase) -> int:
    """Bytes of the buckets of one element that ZeroRedundancyOptimizer makes for ranks without any
    trainable element, where parameters are views of buckets.

    It looks at what is trainable when it steps.
    """
    case = account.case
    if not case.sharding.bucket_view:
        return 0
    last = step if phase == "step" else step - 1
    while account.skips(last):
        last -= 1
    learning = set(account.learning(last))
    return EMPTY_BUCKET_BYTES * sum(
        not any(account.parameters[n].numel for n in shared_out(account, rank) & learning)
        for rank in range(case.world_size)
    )


def shared_states(rank: int) -> Callable[[Account, int, Phase], int]:
    """Return a function of the bytes of the states of the parameters assigned to a rank."""

    def states(account: Account, step: int, phase: Phase) -> int:
        names = account.stateful(step, phase) & shared_out(account, rank)
        return sum(state_bytes(account, name) for name in names)

    return states
