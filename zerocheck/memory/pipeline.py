"""Pipeline parallelism of a simulated model: the stage of a rank, and torch's 1F1B schedule.

Blocks are divided into contiguous stages as in torchtitan (`generate_llm_fqn_per_model_part`):
evenly, with the embedding and the head as a block each, on the first and on the last stage. The
schedule is that of `torch.distributed.pipelining` (Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", section 2.2): stage s of P has the
activations of P - s microbatches at most, and buffers to receive each microbatch stay. Gradients
are accumulated whole, and FSDP2 reduces them after the last microbatch.
A user's model says by `pp_plan` which modules come before and after its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ..contract import Microbatch
from ..errors import UsageError
from ..models.parts import block_list
from ..models.user import call_with
from .allocation_tracker import AllocationTracker, path_of
from .samples import MicrobatchSamples
from .setup import Setup


def stage_blocks(blocks: int, stages: int) -> list[range]:
    """Return the numbers of the blocks of each stage."""
    parts = ((blocks + 1 + stages - place) // stages for place in range(stages))
    ends = [min(max(end - 1, 0), blocks) for end in accumulate(parts, initial=0)]
    return [range(*pair) for pair in pairwise(ends)]


def cut(setup: Setup, model: nn.Module, *, few: bool = False) -> None:
    """Leave the stage of the counted rank in a model of the meta device, in place.

    few: the model has the blocks of this stage alone. Raises UsageError for a model that cannot be
    divided so.
    """
    stages = setup.pipeline_parallel
    option = f"--pipeline-parallel {stages}: {setup.model}"
    if (found := block_list(model)) is None:
        raise UsageError(f"{option} has no list of blocks")
    path, blocks = found
    plan = tuple(getattr(model, "pp_plan", ()))
    at = plan.index(path) if path in plan else -1
    sides: dict[nn.Parameter, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part = next((i for i, one in enumerate(plan) if name.startswith(f"{one}.")), None)
        if part is None or at < 0:
            raise UsageError(
                f"{option} does not say which stage has {name}; give the model an attribute "
                f'pp_plan: ("embedding", "{path}", "head"), of all modules with parameters'
            )
        sides.setdefault(parameter, set()).add((part > at) - (part < at))
    if max(map(len, sides.values())) > 1:
        raise UsageError(f"{option} ties parameters of the first stage to those of the last")
    if not few:
        inside = stage_blocks(len(blocks), stages)
        if not all(inside):
            raise UsageError(f"{option} has {len(blocks)} blocks, too few for a stage each")
        own = inside[setup.place]
        del blocks[own.stop :], blocks[: own.start]
    modules = dict(model.named_modules())
    for others, place in ((plan[:at], 0), (plan[at + 1 :], stages - 1)):
        for module in others:
            if place != setup.place and module in modules:
                model.set_submodule(module, nn.Identity())


def between_stages(setup: Setup, model: nn.Module, samples: MicrobatchSamples) -> torch.Tensor:
    """Return what a block of a whole model of the meta device gives, in the dtype of compute."""
    outputs: list[torch.Tensor] = []
    _, blocks = block_list(model) or ("", nn.ModuleList())
    blocks[0].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    samples = samples.on("meta")
    with torch.no_grad():
        call_with(model, samples.inputs, samples.keywords)
    dtype = torch.bfloat16 if setup.precision == "mixed" else outputs[0].dtype
    return outputs[0].to(dtype).requires_grad_()


class Pipeline(PipelineStage):
    """Stage of the counted rank; it is called as `Built.forward_backward`.

    hidden: what stages send, of one microbatch; tracker: forwards and backwards are its phases.
    Raises UsageError for fewer microbatches than stages, which the schedule refuses.
    """

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        hidden: torch.Tensor,
        mesh: DeviceMesh,
        tracker: AllocationTracker,
    ) -> None:
        stages, device = setup.pipeline_parallel, torch.device(mesh.device_type)
        if (count := setup.microbatches) < stages:
            raise UsageError(
                f"--microbatches {count}: 1F1B of {stages} stages needs {stages} or more"
            )
        group = mesh.get_group("pp")
        super().__init__(model, setup.place, stages, device, hidden, hidden, group=group)
        self._count, self._tracker = count, tracker
        self._schedule = Schedule1F1B(self, count, self._loss, scale_grads=False)

    def __call__(self, microbatches: Sequence[Microbatch]) -> None:
        self._microbatch = microbatches[0]
        inputs, keywords = self._microbatch.inputs, self._microbatch.keywords
        count = len(inputs) - len(keywords)
        args = inputs[:count] if self.is_first else ()
        named: dict[str, Any] = dict(zip(keywords, inputs[count:], strict=True))
        target = self._microbatch.target if self.is_last else None
        self._schedule.step(*args, target=target, losses=[], return_outputs=False, **named)

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self._microbatch.loss_of(output, target) / self._count
        self._tracker.forward_over()
        return loss

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        # There are no other ranks to vote: shapes are those that were given.
        return torch.ones(1, dtype=torch.int32)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if fwd_chunk_id:
            self._tracker.enter("forward", self._tracker.step)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self._tracker.forward_over()
        return output

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients of all units; what each allocates is of its module."""
        reduce: Any = FSDPParamGroup.post_backward

        def reduced(group: Any, *unused: Any) -> None:
            self._tracker.in_backward(path_of(group._module_fqn or ""))
            reduce(group, *unused)

        with mock.patch.object(FSDPParamGroup, "post_backward", reduced):
            super().perform_reduce_grad(grad_scale_factor)
