"""Faults in what a load takes from a checkpoint, or in what was written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ... import causes as bugs
from ...adapters.textbook.checkpoint.chunk import Chunk
from ...adapters.textbook.flat import ShardedBuffer
from ...adapters.textbook.zero1 import Zero1
from ...adapters.textbook.zero2 import Zero2
from ...adapters.textbook.zero3 import Zero3
from ...adapters.zero_redundancy.adapter import ZeroRedundancy
from ...contract.groups import learning_rates
from ...contract.implementation import Loader, Step, StepReport
from ...optimizers import states_of
from ..fault import fault
from ..parts import CheckpointInParts


class Regrouped(CheckpointInParts, Zero1):
    """ZeRO-1 that merges the moments of each bucket after a load, and splits them again."""

    def reshard(self, saved: int) -> None:
        state = self.optimizer.optimizer.state
        for bucket in self.buckets:
            inside = {piece.name: piece.inside for piece in bucket.pieces}
            for role in self.roles(bucket):
                merged = self.gathered(bucket, self.owned_state(role))
                mine = self.split_again(bucket, merged, saved)[bucket.mine]
                for one in self.optimizer.owned:
                    if one.piece.name in inside and role in state.get(one.parameter, {}):
                        state[one.parameter][role].copy_(mine[inside[one.piece.name]])

    def split_again(self, bucket: ShardedBuffer, merged: torch.Tensor, saved: int) -> torch.Tensor:
        """Return the merged moments as this rank finds them; saved: number of ranks that saved."""
        raise NotImplementedError


@fault(
    obligation="roundtrip", source="DS PR#5105", features=("resume-more",),
    attributed=r"elements? further back",
)  # fmt: skip
class MomentsMisaligned(Regrouped):
    """Moments are split among other ranks by shards that are one element too short."""

    def split_again(self, bucket: ShardedBuffer, merged: torch.Tensor, saved: int) -> torch.Tensor:
        return merged.roll(self.group.rank())


@fault(
    obligation="roundtrip", source="DS PR#5342, PR#5395", features=("resume-many",),
    without=("resume-same", "two-axes"), world=11, attributed=r"in another order of shards",
)  # fmt: skip
class RankFilesSortedAsText(Regrouped):
    """Moments are merged in the order of the names of files, where rank 10 comes before rank 2."""

    def split_again(self, bucket: ShardedBuffer, merged: torch.Tensor, saved: int) -> torch.Tensor:
        size = -(-_end(bucket) // saved)
        whole = merged.new_zeros(max(size * saved, merged.numel()))
        whole[: merged.numel()] = merged
        parts = whole[: size * saved].view(saved, size)
        whole[: size * saved] = parts[sorted(range(saved), key=str)].flatten()
        return whole[: merged.numel()]


def _end(bucket: ShardedBuffer) -> int:
    """Return the end of the last parameter in a bucket, before its padding."""
    gaps = bucket.partition.padding(0, bucket.partition.numel)
    last = gaps[-1] if gaps else slice(0, 0)
    return last.start if last.stop == bucket.partition.numel else bucket.partition.numel


@fault(
    obligation="roundtrip", source="MG PR#5077", features=("resume", "bucket-small"), world=3,
    attributed=r"further on in their flat buffers|in no regular order",
)  # fmt: skip
class BucketPaddingCounted(Zero2):
    """Saved moments are packed without the padding of buckets, and cut at offsets that count it.

    So those of later buckets begin too late, and the last ones end in zeros.
    """

    def written(self) -> Iterator[Chunk]:
        packed: dict[str, torch.Tensor] = {}
        starts: dict[str, int] = {}
        if self.replicas.first:
            before = 0
            for bucket in self.buckets:
                for name, offset in zip(bucket.names, bucket.partition.offsets, strict=True):
                    starts[name] = before + offset
                before += bucket.partition.numel
            for role in states_of(self.case.optimizer):
                parts = [
                    self.gathered(bucket, self.owned_state(role))[: _end(bucket)]
                    for bucket in self.buckets
                ]
                zeros = torch.zeros(before, device=self.optimizer.device)
                packed[role] = torch.cat([*(part.float() for part in parts), zeros])
        for chunk in super().written():
            name, _, of = chunk.key.removeprefix("optimizer.state.").rpartition(".")
            if chunk.key.startswith("optimizer.") and of in packed:
                start = starts[name] + chunk.start
                wrong = packed[of][start : start + chunk.tensor.numel()].to(chunk.tensor.dtype)
                yield replace(chunk, tensor=wrong)
            else:
                yield chunk


@fault(bugs.MOMENTS_LOST, source="nanotron PR#245", features=("resume-more",))
class VectorMomentsLost(CheckpointInParts, Zero3):
    """On another number of ranks the moments of matrices alone are loaded, those of vectors are 0.

    Only parameters that tensor parallelism shards are looked up in the checkpoint.
    """

    def reshard(self, saved: int) -> None:
        for one, state in self.moments():
            if len(one.piece.shape) < 2:
                state.zero_()


@fault(
    bugs.ROUNDED_TO_BF16, obligation="roundtrip", source="nanotron PR#245",
    features=("resume-fewer",),
)  # fmt: skip
class MomentsNarrowOnLoad(CheckpointInParts, Zero1):
    """On another number of ranks moments pass through memory of the compute dtype."""

    def reshard(self, saved: int) -> None:
        for _, state in self.moments():
            state.copy_(state.bfloat16())


@fault(
    bugs.LEARNING_RATE_OF_ANOTHER_STEP, obligation="continuation", source="nanotron PR#245",
    features=("resume", "schedule-warmup"),
)  # fmt: skip
class FirstRateAfterLoad(CheckpointInParts, Zero2):
    """The first step after a load has the learning rate with which training began."""

    loaded = False

    def end_load(self) -> None:
        self.loaded = True

    def train_step(self, step: Step) -> StepReport:
        if self.loaded:
            step = replace(step, lr=tuple(learning_rates(self.case, 0)))
            self.loaded = False
        return super().train_step(step)


@fault(
    obligation="roundtrip", source="GPT-NeoX PR#308", features=("resume", "microbatches"),
    microbatches=3, attributed=r"the data position is \d+ samples",
)  # fmt: skip
class DataPositionWithoutMicrobatches(CheckpointInParts, Zero1):
    """The loader resumes as if each step had read one microbatch of each rank."""

    def position(self, count: int) -> int:
        return count // self.case.training.microbatches


@fault(bugs.TENSORS_EXCHANGED, source="FS #380, PR#483; PT PR#54736", features=("resume", "groups"))
class StatesInModelOrder(ZeroRedundancy):
    """States are saved in the order of parameter groups, and loaded in the order of the model."""

    def load(self, directory: str, loader: Loader) -> None:
        optimizer: Any = self._optimizer
        take = optimizer.load_state_dict
        optimizer.load_state_dict = lambda states: take(
            {**states, "state": self._renumbered(states["state"])}
        )
        try:
            super().load(directory, loader)
        finally:
            del optimizer.load_state_dict

    def _renumbered(self, states: dict[int, Any]) -> dict[int, Any]:
        """Return the states with other numbers; another shape would be refused, so it is kept."""
        grouped = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(grouped)}
        saved: dict[torch.Size, list[int]] = defaultdict(list)
        for number, parameter in enumerate(grouped):
            saved[parameter.shape].append(number)
        found = {}
        for parameter in self._inner.parameters():
            if parameter in numbers:
                found[numbers[parameter]] = states.get(saved[parameter.shape].pop(0))
        return {number: state for number, state in found.items() if state is not None}
