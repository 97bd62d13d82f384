"""Faults planted into DeepSpeed's engine; they need the extra `deepspeed`.

They change the objects of one engine, or DeepSpeed's functions while a step is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero import stage_1_and_2

from .. import causes as bugs
from ..adapters.deepspeed.stage3 import DeepSpeed3
from ..adapters.deepspeed.stage12 import DeepSpeed1, DeepSpeed2
from ..contract import Loader, Step, StepReport
from .fault import STATE, fault
from .parts import Plantable


@fault(bugs.GRADIENT_TIMES_W, source="PT #162338", world=3)
class EngineDividesByNothing(Plantable, DeepSpeed1):
    """Gradients are summed over ranks and not divided."""

    def plant(self) -> None:
        self.optimizer.gradient_average = False


@fault(bugs.SHIFTED, source="DS PR#848, #851", world=3)
class EnginePartitionOffByOne(Plantable, DeepSpeed1):
    """The gradient of a partition begins one element too far."""

    def plant(self) -> None:
        flat_partition = self.optimizer.get_flat_partition

        def shifted(*given: Any, **options: Any) -> list[torch.Tensor]:
            flat = torch.cat([part.reshape(-1) for part in flat_partition(*given, **options)])
            return [torch.cat([flat[1:], flat.new_zeros(1)])]

        self.optimizer.get_flat_partition = shifted


@fault(
    bugs.COPIES_OF_THE_PREVIOUS_STEP, source="DS PR#7707; MG #3140",
    spares=("ownership", "loss", "gradient"), world=2,
)  # fmt: skip
class EngineGathersStale(DeepSpeed2):
    """The updated partitions are not sent to the other ranks."""

    def train_step(self, step: Step) -> StepReport:
        with mock.patch.object(stage_1_and_2, "all_gather_dp_groups"):
            return super().train_step(step)


@fault(bugs.LAST_MICROBATCH_ONLY, source="DS #7718", spares=STATE, world=3, microbatches=3)
class EngineKeepsLastMicrobatch(DeepSpeed3):
    """Each microbatch overwrites the gradient of those before it."""

    def train_step(self, step: Step) -> StepReport:
        self.optimizer.clear_backward_seen_flag = self._forget
        return super().train_step(step)

    def _forget(self) -> None:
        self.optimizer.micro_step_id = 0
        self.optimizer._backward_hook_state.reset_for_new_step()


@fault(bugs.OPTIMIZER_STATE_LOST, source="DS #2101", features=("resume",))
class EngineForgetsMoments(DeepSpeed2):
    """A resumed training starts with fresh moments."""

    def load(self, directory: str, loader: Loader) -> None:
        load = self.engine.load_checkpoint
        with mock.patch.object(
            self.engine, "load_checkpoint", lambda path: load(path, load_optimizer_states=False)
        ):
            super().load(directory, loader)


@fault(bugs.MOMENTS_SWAPPED, obligation="export", source="none known", features=("resume",))
class EngineExportsMoment(DeepSpeed3):
    """Reading exp_avg returns exp_avg_sq."""

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        given = dict(super().export())
        for name, role in list(given):
            if role == "exp_avg":
                given[name, role] = given[name, "exp_avg_sq"]
        return given


@fault(
    bugs.ROUNDED_TO_BF16, obligation="roundtrip", source="none known",
    features=("resume", "compute-bf16"),
)  # fmt: skip
class EngineForgetsMasters(DeepSpeed2):
    """A resumed training makes its fp32 masters from the bf16 parameters."""

    def load(self, directory: str, loader: Loader) -> None:
        super().load(directory, loader)
        self.optimizer.refresh_fp32_params()


@fault(bugs.COPIES_OF_THE_PREVIOUS_STEP, source="DS PR#4141", features=("compute-bf16",))
class EngineKeepsCopy(DeepSpeed3):
    """The bf16 parameters are not refreshed from their masters."""

    def train_step(self, step: Step) -> StepReport:
        optimizer = self.optimizer
        with mock.patch.object(optimizer, "_reassign_or_swap_out_partitioned_parameters"):
            return super().train_step(step)


@fault(
    bugs.ACCUMULATED_IN(format="bf16"), source="none known",
    features=("compute-bf16", "reduce-wide"), microbatches=3,
)  # fmt: skip
class EngineSumsInBf16(Plantable, DeepSpeed1):
    """Microbatches are summed in bf16 although fp32 is configured."""

    def plant(self) -> None:
        update = self.optimizer.update_hp_grads

        def rounded(*given: Any, **options: Any) -> None:
            update(*given, **options)
            for gradients in self.optimizer.fp32_groups_gradients_flat:
                gradients.copy_(gradients.bfloat16())

        self.optimizer.update_hp_grads = rounded
