"""Faults that are hidden on one host, where local rank and rank, host and world coincide."""

from __future__ import annotations

import os

import torch.distributed as dist

from .. import causes as bugs
from ..adapters.textbook.sharded_optimizer import OwnedPiece, ShardedOptimizer
from ..adapters.textbook.zero1 import Zero1
from ..adapters.textbook.zero3 import Zero3
from .fault import fault
from .parts import Plantable, Zero1InParts


def _number(name: str) -> int:
    return int(os.environ[name])


@fault("ownership", bugs.SHARD_OF_THE_LOCAL_RANK, source="DS PR#7601", world=3, features=("hosts",))
class LocalRankForRank(Plantable, Zero3):
    """The local rank chooses the shard."""

    def plant(self) -> None:
        for flat in self.flats:
            flat.gather()
            flat.wait()
            flat.mine = flat.partition.shard(_number("LOCAL_RANK"))
            flat.pieces = flat.partition.pieces(_number("LOCAL_RANK"))
            flat.shard.copy_(flat.full[flat.mine])
            flat.release()
        owned = [one for wide in self.wide for one in wide.owned()]
        device = self.optimizer.device
        self.optimizer = ShardedOptimizer(self.case, owned, self.group, device)


@fault(
    "gradient", bugs.DIVIDED_BY_THE_RANKS_OF_A_HOST, source="seen often", world=3,
    features=("hosts",),
)  # fmt: skip
class DividedByLocalWorldSize(Zero1InParts):
    """The sum over all ranks is divided by the number of ranks on the host."""

    def after_reduction(self, one: OwnedPiece) -> None:
        one.gradient.mul_(self.world_size).div_(_number("LOCAL_WORLD_SIZE"))


@fault("gradient", bugs.REDUCED_WITHIN_EACH_HOST, source="seen often", world=3, features=("hosts",))
class ReducedWithinHost(Plantable, Zero1):
    """Gradients are reduced over the ranks of each host, never between hosts."""

    def plant(self) -> None:
        hosts = [0] * self.world_size
        dist.all_gather_object(hosts, _number("GROUP_RANK"), group=self.group)
        here = [rank for rank, host in enumerate(hosts) if host == _number("GROUP_RANK")]
        self.within = dist.new_group(
            [dist.get_global_rank(self.group, rank) for rank in here],
            use_local_synchronization=True,
        )

    def _reduce(self) -> None:
        for bucket, gradients in zip(self.buckets, self.gradients, strict=True):
            dist.all_reduce(gradients, group=self.within)
            bucket.gradient.div_(self.within.size())
        self.reduced = True

    def close(self) -> None:
        dist.destroy_process_group(self.within)
        super().close()
