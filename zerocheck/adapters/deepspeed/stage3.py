"""Stage 3: parameters are sharded as well, each one over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...case.schema import Case
from ...contract import Semantics, Shard
from ...contract.implementation import Stage
from ...contract.partitions import Full, GroupPartition, is_gathered, of_parts, range_of_part
from ...protocol.layout import Layout
from . import alone
from .layout import part_layout
from .options import named
from .stage12 import PartitionedStage


class DeepSpeed3(PartitionedStage):
    """Stage 3: a rank holds one part of each parameter, of equal size on all ranks, the last one
    padded; modules gather their parameters when they are called.

    A parameter of at most `persistence_threshold` elements stays gathered, and is shown whole. The
    gradients of each microbatch are reduced.
    """

    semantics = Semantics(accumulate="reduce_each", unused="zero", buffers="local", weight="token")
    simulated = alone.traits(
        {
            "overlap_comm": True,
            "prefetch_bucket": 50_000_000,
            "persistence_threshold": 100_000,
            "max_live_parameters": 1_000_000_000,
        }
    )
    zero = 3
    stage: Stage | None = 3
    options = (
        "bucket",
        "offload",
        *named(
            "overlap_comm",
            "contiguous_gradients",
            "reduce_scatter",
            "prefetch_bucket",
            "persistence_threshold",
            "max_live_parameters",
            "own_optimizer",
            "universal",
            "read_out",
        ),
    )

    @classmethod
    def layout(cls, model: nn.Module, case: Case, rank: int) -> Layout | None:
        """Return the layout between steps; the same on every rank."""
        return part_layout(model, case)

    named: Mapping[str, Any]
    """Parameters with what DeepSpeed adds to them: ds_tensor is this rank's part."""

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        # The first forward gathers what stays gathered, and so does saving before it. Done now, a
        # rank holds the same before and after a checkpoint.
        self.optimizer.checkpoint_event_epilogue()
        self.stays_gathered = tuple(n for n, one in self.named.items() if one.ds_persist)
        if all(parameter.ds_persist for parameter in self.named.values()):
            self.stage = 2

    def _partitions(self) -> Iterator[GroupPartition]:
        """Iterate over the partitions, one per group: the parts of its parameters, end to end."""
        yield from of_parts(
            self.optimizer.fp16_partitioned_groups_flat,
            self.optimizer.fp32_partitioned_groups_flat,
            self.named,
            self._range,
        )

    def _range(self, parameter: Any) -> tuple[int, int]:
        """Return the element range of a parameter that this rank holds."""
        return range_of_part(parameter, self.rank)

    def _parameters(self) -> Iterator[Shard]:
        for name, parameter in self.named.items():
            shape = tuple(parameter.ds_shape)
            part = parameter.ds_tensor
            start, stop = self._range(parameter)
            if is_gathered(parameter):
                yield Shard(name, "parameter", parameter.detach(), shape)
                gap = slice(0, part.numel())  # its part, which is not used
                yield Shard("", "padding", part.detach(), tuple(part.shape), gap)
                continue
            data = part.detach()[: stop - start]
            yield Shard(name, "parameter", data, shape, slice(start, stop))
            if stop - start < part.numel():
                gap = slice(stop - start, part.numel())
                yield Shard("", "padding", part.detach()[gap], tuple(part.shape), gap)

    def restore(self, full: Full) -> None:
        """Restore this rank's part of everything, and the persistent parameters as a whole."""
        for name, parameter in self.named.items():
            whole = full[name, "parameter"]
            start, stop = self._range(parameter)
            parameter.ds_tensor.detach()[: stop - start].copy_(whole.reshape(-1)[start:stop])
            if is_gathered(parameter):
                parameter.detach().copy_(whole)
        self._restore_states(full)
