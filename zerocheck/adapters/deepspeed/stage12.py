"""Stages 1 and 2, and their base with stage 3: a flat partition of each group is updated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...case.schema import Case
from ...contract import Semantics, Shard
from ...contract.implementation import Stage
from ...contract.partitions import Full, GroupPartition, gaps, lying_in, of_whole_groups
from ...optimizers import STATES
from ...protocol.layout import Layout
from . import alone
from .adapter import DeepSpeed
from .layout import flat_layout
from .options import named
from .precision import keeps_whole_gradients

STAGE_OPTIONS = (
    "bucket",
    "offload",
    *named(
        "overlap_comm",
        "contiguous_gradients",
        "reduce_scatter",
        "round_robin_gradients",
        "own_optimizer",
        "universal",
        "read_out",
    ),
)


class PartitionedStage(DeepSpeed):
    """Gradients, moments and fp32 copies are read from this rank's partitions."""

    simulated = alone.traits()

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.rank = mesh.get_local_rank()
        self.partitions = list(self._partitions())
        self.updated = len(self.partitions)
        self.offloads = self._offloads_states()

    def _offloads_states(self) -> bool:
        """Return True if the optimizer runs on the CPU, with gradients offloaded there."""
        return self.case.sharding.offload != "none"

    def _partitions(self) -> Iterator[GroupPartition]:
        """Iterate over this rank's partitions, in the order of the optimizer's groups."""
        raise NotImplementedError

    def _gradients(self) -> Iterator[Shard]:
        for number, part in enumerate(self.partitions):
            clipped = self._clipped.get(part.master)
            if clipped is not None:
                yield from part.shards("gradient", clipped)
                continue
            if self.offloads:
                if part.master.grad is not None:
                    yield from part.shards("gradient", part.master.grad)
                continue
            if keeps_whole_gradients(self.optimizer):
                partition = self.optimizer.fp32_groups_gradient_flat_partition[number]
                yield from part.shards("gradient", partition)
                continue
            reduced = self.optimizer.averaged_gradients.get(number)
            if reduced is not None:
                yield from part.shards("gradient", *reduced)

    def _states(self) -> Iterator[Shard]:
        for name, parameter in self.named.items():
            if parameter.requires_grad and not parameter.numel() and self.zero < 3:
                yield Shard(name, "master", torch.empty(0), tuple(parameter.shape), slice(0, 0))
        for part in self.partitions:
            yield from part.shards("master", part.master)
            state = self.inner.state.get(part.master, {})
            for role in STATES:
                if role in state:
                    yield from part.shards(role, state[role])
            if "step" in state:
                for piece in part.pieces:
                    yield Shard(piece.name, "step", state["step"], ())

    def _restore_states(self, full: Full) -> None:
        """Take this rank's part of the fp32 copies and moments."""
        steps = {name: value for (name, role), value in full.items() if role == "step"}
        trained = [name for name, role in full if role in ("step", *STATES)]
        for part in self.partitions:
            part.fill(part.master.detach(), full, "parameter")
            state = self.inner.state[part.master]
            # One count for a group, of which this rank may hold nothing.
            names = [piece.name for piece in part.pieces] or trained
            if steps:
                state["step"] = steps[names[0]].clone()
            for role in STATES:
                if (names[0], role) in full:
                    state[role] = torch.zeros_like(part.master)
                    part.fill(state[role], full, role)

    def close(self) -> None:
        self.partitions.clear()
        super().close()


class DeepSpeed1(PartitionedStage):
    """Stage 1: the fp32 copies and moments are cut. Gradients are summed on each rank, and reduced
    with the last microbatch."""

    zero = 1
    stage: Stage | None = 1
    options = STAGE_OPTIONS

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return the layout between steps; the same on every rank."""
        return flat_layout(model, case, stage=cls.zero)

    def _partitions(self) -> Iterator[GroupPartition]:
        """Iterate over this rank's partitions, of equal size on every rank, in group order."""
        masters = (
            self.optimizer.fp32_groups_flat_partition
            if keeps_whole_gradients(self.optimizer)
            else self.optimizer.single_partition_of_fp32_groups
        )
        flats = self._flat_groups()
        yield from of_whole_groups(flats, list(masters), self.named, [self.rank] * len(flats))

    def _flat_groups(self) -> list[torch.Tensor]:
        """Return the parameters of each group, 1-D, whole on each rank."""
        if keeps_whole_gradients(self.optimizer):
            return list(self.optimizer.bf16_groups_flat)
        return list(self.optimizer.bit16_groups_flat)

    def _parameters(self) -> Iterator[Shard]:
        for name, parameter in self.named.items():
            yield Shard(name, "parameter", parameter.detach(), tuple(parameter.shape))
        for flat in self._flat_groups():
            for gap in gaps(flat, lying_in(flat, self.named)):
                yield Shard("", "padding", flat[gap], tuple(flat.shape), gap)

    def restore(self, full: Full) -> None:
        """Restore whole parameters on every rank, and this rank's part of the other state."""
        for name, parameter in self.named.items():
            parameter.detach().copy_(full[name, "parameter"])
        self._restore_states(full)


class DeepSpeed2(DeepSpeed1):
    """Stage 2: gradients are reduced with each microbatch, and a rank keeps those of its part."""

    semantics = Semantics(accumulate="reduce_each", unused="zero", buffers="local", weight="token")
    zero = 2
    stage = 2
