"""Implementation made from the user's config: what Lightning's Trainer makes of it, in its loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...case.schema import Case
from ...contract import Semantics
from ...contract.build import Built, BuiltImplementation
from ...contract.implementation import Implementation, Kept, Loader, Saving, Step, StepReport
from ...contract.wrapper_limits import ddp_in
from ..shared.config_class import class_for
from ..shared.exports import export_of
from ..shared.limits import contradiction
from ..shared.whole_folder import newest_whole, write_whole
from .refusals import FREED, refusal
from .strategies import strategy_for
from .trainer import load, save, take_step, trainer_for
from .user_config import LightningConfig, read

CHECKPOINT = "lightning.ckpt"
"""File, or folder, of a checkpoint in its numbered folder."""


DATA: tuple[Kept, ...] = ("data",)
"""Parts of the state that modules keep in checkpoints. The random state is not Lightning's."""


def of_file(name: str) -> type[Implementation]:
    """Make the class of a config of LightningCLI.

    Raises UsageError as `user_config.read` does.
    """
    return class_for(read(name), class_of)


def class_of(given: LightningConfig, **members: Any) -> type[Implementation]:
    """Make the class of a config. members: attributes of it, in addition."""
    fsdp = given.strategy.fsdp
    attributes: dict[str, Any] = {
        "given": given,
        "fixed": given.fixed,
        "stage": 0 if fsdp is None or fsdp.sharding == "NO_SHARD" else 3,
        "options": ("bucket",) if fsdp is not None and fsdp.units.kind == "size" else (),
        "without": _without(given),
        "capabilities": frozenset({"precision"} if given.precision == "bf16-mixed" else ()),
        **members,
    }
    if fsdp is not None and (not fsdp.full or "export" in attributes["without"]):
        attributes["export"] = Implementation.export
    return type("LightningConfigured", (LightningTrained,), attributes)


class LightningTrained(BuiltImplementation):
    """Model and optimizer as Lightning's Trainer prepares them, in its automatic optimization."""

    given: ClassVar[LightningConfig]
    keeps: ClassVar[Collection[Kept]] = DATA

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None. The config may contradict the case."""
        return contradiction(cls.given.name, cls.given.fixed, case) or refusal(cls.given, case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.semantics = _semantics(self.given, case)
        super().__init__(model, case, mesh)
        ddp = ddp_in(self.built.model)
        if ddp is not None and ddp.broadcast_buffers:
            self.semantics = replace(self.semantics, buffers="rank0")

    def strategy(self, model: nn.Module, case: Case) -> str | Strategy:
        """Return what the Trainer is given as its strategy."""
        return strategy_for(self.given, model, case)

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Have a Trainer prepare the model, and the optimizer of the case."""
        asked = self.strategy(model, case)
        self.trainer = trainer_for(model, case, mesh, asked, self.given.precision)
        prepared: Any = self.trainer.strategy.model
        return Built(prepared, self.trainer.strategy.optimizers[0])

    def train_step(self, step: Step) -> StepReport:
        """Take one step by the loop of the Trainer, which reports no norm."""
        self.set_learning_rates(step.lr)
        take_step(self.trainer, step)
        return StepReport()

    def save(self, directory: str, loader: Loader) -> Saving | None:
        """Save by `Trainer.save_checkpoint`."""
        write_whole(directory, lambda place: save(self.trainer, _checkpoint(place), loader))
        return None

    def load(self, directory: str, loader: Loader) -> None:
        """Load as `fit(ckpt_path=...)` does."""
        load(self.trainer, _checkpoint(newest_whole(directory)), loader)

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Export the parameters and buffers that the strategy has in its checkpoints."""
        state = self.trainer.strategy.lightning_module_state_dict()
        return export_of(state, self.names, self.built.model)

    def close(self) -> None:
        super().close()
        del self.trainer


def _checkpoint(place: str) -> str:
    return str(Path(place) / CHECKPOINT)


def _without(given: LightningConfig) -> dict[str, str]:
    """Return the obligations that no case can exercise, and why."""
    fsdp = given.strategy.fsdp
    training = given.fixed.get("training", {})
    without = {}
    if "clip" in training and training["clip"] is None:
        without["clip"] = f"{given.name} clips nothing"
    if given.precision == "bf16-mixed" and fsdp is not None:
        without["buffers"] = "FSDP casts batch norms to bf16, which torch on the CPU cannot run"
    if fsdp is not None and fsdp.checkpointing.kind != "whole":
        without["buffers"] = "activation checkpointing updates running statistics twice"
    if fsdp is not None and not fsdp.full:
        without["export"] = "sharded checkpoints have no whole state"
    elif fsdp is not None and not torch.accelerator.is_available():
        of_resume = ("export", "roundtrip", "continuation", "durability", "damage")
        without |= dict.fromkeys(of_resume, FREED)
    return without


def _semantics(given: LightningConfig, case: Case) -> Semantics:
    """Return what Lightning means by a step: torch's defaults, under autocast in bf16."""
    if case.precision.compute == "fp32":
        return Semantics()
    if given.strategy.fsdp is None:
        return Semantics(compute="bf16", precision_mode="autocast")
    return Semantics(
        compute="bf16", precision_mode="cast_and_autocast", inputs="cast", reduce="bf16"
    )
