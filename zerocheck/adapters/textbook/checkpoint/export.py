"""Whole tensors from the shards of all ranks, by separate all-gathers: no files, no chunks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ....case.schema import Case
from ....compat import all_gather_single, wait
from ....contract import Implementation
from ....optimizers import rule_of, states_of
from ....optimizers.state_shape import WHOLE, StateShape
from ..flat import ShardedBuffer
from ..reduction import Replicas
from ..sharded_optimizer import ShardedOptimizer

Whole = dict[tuple[str, str], torch.Tensor]


class Exporter(Implementation):
    """Base of sharders with `export`."""

    case: Case
    model: nn.Module
    group: dist.ProcessGroup
    """The ranks over which the model is cut."""
    everyone: dist.ProcessGroup
    """All ranks: those of all replicas."""
    replicas: Replicas
    optimizer: ShardedOptimizer

    def flat_buffers(self) -> Sequence[ShardedBuffer]:
        """Return the flat buffers of this rank, in the same order on every rank."""
        raise NotImplementedError

    def replicated(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters in no flat buffer, which every rank holds whole."""
        flat = {name for one in self.flat_buffers() for name, _ in one.partition.shapes}
        return [pair for pair in self.model.named_parameters() if pair[0] not in flat]

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Return every parameter, moment and step count as before sharding, on every rank.

        Buffers are those of rank 0. All tensors are copies, on the device of the shards.
        """
        whole: Whole = {}
        counts, stepped = self.step_counts(), self.stepped()
        for flat in self.flat_buffers():
            held = {piece.name: flat.shard[piece.inside] for piece in flat.pieces}
            whole.update(self.split(flat, "parameter", self.gathered(flat, held)))
            for role in self.roles(flat):
                expanded = self.gathered(flat, self.owned_state(role))
                for key, tensor in self.split(flat, role, expanded).items():
                    shape = self.state_shape(key[0], role, tensor)
                    if key[0] in stepped and shape is not None:
                        whole[key] = shape.contracted(tensor)
        whole.update({(name, "step"): torch.tensor(count) for name, count in counts.items()})
        for name, parameter in self.replicated():
            whole[name, "parameter"] = parameter.detach().clone()
        for name, buffer in self.model.named_buffers():
            whole[name, "buffer"] = self.of_rank_0(buffer)
        return whole

    def roles(self, flat: ShardedBuffer) -> tuple[str, ...]:
        """Return the roles of the states of a buffer's parameters, the same on every rank."""
        options, (name, shape) = self.case.optimizer, flat.partition.shapes[0]
        return rule_of(options, name, shape).states_with(options)

    def owned_state(self, role: str) -> dict[str, torch.Tensor]:
        """Return the owned ranges of one role, by name; those of factored states are expanded."""
        held = self.optimizer.optimizer.state
        found = {}
        for one in self.optimizer.owned:
            if role in held.get(one.parameter, {}):
                state = torch.as_tensor(held[one.parameter][role])
                shape = self.state_shape(one.piece.name, role, one.parameter) or WHOLE
                found[one.piece.name] = shape.expanded(state, one.parameter.shape).reshape(-1)
        return found

    def state_shape(self, name: str, role: str, parameter: torch.Tensor) -> StateShape | None:
        """Return the shape of a state, None for one that the parameter does not have."""
        rule = rule_of(self.case.optimizer, name, parameter.shape)
        return rule.state_shape(role, parameter.dim())

    def step_counts(self) -> dict[str, float]:
        """Return the step count of every parameter that has one, from its owners."""
        mine = {name: float(step) for name, step in self.owned_state("step").items()}
        return self.of_all_owners(mine)

    def stepped(self) -> Collection[str]:
        """Return the names of the parameters that some rank has states of."""
        roles = states_of(self.case.optimizer)
        mine = {name: 1.0 for role in roles for name in self.owned_state(role)}
        return self.of_all_owners(mine)

    def of_all_owners(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Gather numbers by name from all ranks of the group."""
        numbers: list[dict[str, float]] = [{} for _ in range(self.group.size())]
        dist.all_gather_object(numbers, dict(mine), self.group)
        return {name: number for of_rank in numbers for name, number in of_rank.items()}

    def gathered(self, flat: ShardedBuffer, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Gather the whole flat buffer, 1-D, from the ranks' parts; 0 where no rank holds any."""
        shard = torch.zeros_like(flat.shard)
        for piece in flat.pieces:
            if piece.name in held:
                shard[piece.inside] = held[piece.name]
        whole = flat.shard.new_zeros(flat.partition.numel)
        wait(all_gather_single(whole, shard, self.group))
        return whole

    def split(self, flat: ShardedBuffer, role: str, whole: torch.Tensor) -> Whole:
        """Split a whole flat buffer into its tensors, without the padding."""
        return {
            (name, role): whole[offset : offset + math.prod(shape)].view(shape).clone()
            for (name, shape), offset in zip(
                flat.partition.shapes, flat.partition.offsets, strict=True
            )
        }

    def of_rank_0(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of rank 0's tensor."""
        copy = tensor.detach().clone()
        dist.broadcast(copy, dist.get_global_rank(self.everyone, 0), group=self.everyone)
        return copy
