"""Faults planted into DeepSpeed's engine; they need the extra `deepspeed`.

They change the objects of one engine, or DeepSpeed's functions while a step is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero import stage_1_and_2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapters.deepspeed.stage3 import DeepSpeed3
from ..adapters.deepspeed.stage12 import DeepSpeed1, DeepSpeed2
from ..case.schema import Case
from ..contract import Loader, Step, StepReport


class EngineDividesByNothing(DeepSpeed1):
    """Gradients are summed over ranks and not divided (PT #162338).

    Flagged: gradient x W.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        self.optimizer.gradient_average = False


class EnginePartitionOffByOne(DeepSpeed1):
    """The gradient of a partition begins one element too far (DS PR#848, #851).

    Flagged: shifted.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        flat_partition = self.optimizer.get_flat_partition

        def shifted(*given: Any, **options: Any) -> list[torch.Tensor]:
            flat = torch.cat([part.reshape(-1) for part in flat_partition(*given, **options)])
            return [torch.cat([flat[1:], flat.new_zeros(1)])]

        self.optimizer.get_flat_partition = shifted


class EngineGathersStale(DeepSpeed2):
    """The updated partitions are not sent to the other ranks (DS PR#7707).

    Flagged: copies of the previous step.
    """

    def train_step(self, step: Step) -> StepReport:
        with mock.patch.object(stage_1_and_2, "all_gather_dp_groups"):
            return super().train_step(step)


class EngineKeepsLastMicrobatch(DeepSpeed3):
    """Each microbatch overwrites the gradient of those before it (DS #7718).

    Flagged: last microbatch only.
    """

    def train_step(self, step: Step) -> StepReport:
        self.optimizer.clear_backward_seen_flag = self._forget
        return super().train_step(step)

    def _forget(self) -> None:
        self.optimizer.micro_step_id = 0
        self.optimizer._backward_hook_state.reset_for_new_step()


class EngineForgetsMoments(DeepSpeed2):
    """A resumed training starts with fresh moments (DS #2101).

    Flagged: optimizer state lost.
    """

    def load(self, directory: str, loader: Loader) -> None:
        load = self.engine.load_checkpoint
        with mock.patch.object(
            self.engine, "load_checkpoint", lambda path: load(path, load_optimizer_states=False)
        ):
            super().load(directory, loader)


class EngineExportsMoment(DeepSpeed3):
    """Reading exp_avg returns exp_avg_sq (none known).

    Flagged: moments swapped.
    """

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        given = dict(super().export())
        for name, role in list(given):
            if role == "exp_avg":
                given[name, role] = given[name, "exp_avg_sq"]
        return given


class EngineForgetsMasters(DeepSpeed2):
    """A resumed training makes its fp32 masters from the bf16 parameters (none known).

    Flagged: roundtrip, rounded to bf16.
    """

    def load(self, directory: str, loader: Loader) -> None:
        super().load(directory, loader)
        self.optimizer.refresh_fp32_params()


class EngineKeepsCopy(DeepSpeed3):
    """The bf16 parameters are not refreshed from their masters (DS PR#4141).

    Flagged: publish, copies of the previous step.
    """

    def train_step(self, step: Step) -> StepReport:
        optimizer = self.optimizer
        with mock.patch.object(optimizer, "_reassign_or_swap_out_partitioned_parameters"):
            return super().train_step(step)


class EngineSumsInBf16(DeepSpeed1):
    """Microbatches are summed in bf16 although fp32 is configured (none known).

    Flagged: gradient, accumulated in bf16.
    """

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        super().__init__(model, case, mesh)
        update = self.optimizer.update_hp_grads

        def rounded(*given: Any, **options: Any) -> None:
            update(*given, **options)
            for gradients in self.optimizer.fp32_groups_gradients_flat:
                gradients.copy_(gradients.bfloat16())

        self.optimizer.update_hp_grads = rounded
