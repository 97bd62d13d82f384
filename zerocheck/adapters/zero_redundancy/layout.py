"""Layout of DDP with ZeroRedundancyOptimizer: the parameters that each rank updates."""

from __future__ import annotations

from collections.abc import Callable

from ...contract.groups import group_of
from ...protocol.layout import Phase
from ..ddp.layout import state_bytes
from ..shared.account import Account

EMPTY_BUCKET_BYTES = 4
"""One element of fp32."""


def shared_out(account: Account, rank: int) -> set[str]:
    """Return the names of the parameters that ZeroRedundancyOptimizer assigns to a rank.

    Group by group, the largest first, each goes to the rank that has the fewest elements so far.
    """
    case = account.case
    elements = [0] * case.world_size
    assigned: set[str] = set()
    for group in range(len(case.optimizer.groups)):
        members = [name for name in account.ever() if group_of(case, name) == group]
        for name in sorted(members, key=lambda n: account.parameters[n].numel, reverse=True):
            least = elements.index(min(elements))
            elements[least] += account.parameters[name].numel
            if least == rank:
                assigned.add(name)
    return assigned


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
        names = account.stateful(step, phase, lambda at: account.used(account.learning(at)))
        return sum(state_bytes(account, name) for name in names & shared_out(account, rank))

    return states
