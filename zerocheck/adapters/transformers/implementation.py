"""Implementation made from TrainingArguments: what a Trainer makes of them, in its loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer, TrainingArguments

from ...case.schema import Case
from ...case.shapes import transposed
from ...contract.build import Built
from ...contract.groups import make_optimizer
from ...contract.implementation import Implementation, Kept, Loader, Saving
from ...contract.wrapper_limits import ddp_in
from ...errors import Unsupported
from ..accelerate.implementation import Accelerated, class_of, units
from ..accelerate.launch import use_fsdp
from ..shared.config_class import class_for
from ..shared.whole_folder import newest_whole, write_whole
from .user_config import TrainerConfig, read


def of_file(name: str) -> type[Implementation]:
    """Make the class of TrainingArguments in a file.

    Raises UsageError as `user_config.read` does.
    """
    return class_for(read(name), partial(class_of, Trained))


RNG: tuple[Kept, ...] = ("rng",)
"""Parts of the state that a checkpoint of a Trainer holds beside the model and the optimizer."""


class CaseTrainer(Trainer):  # type: ignore[misc,unused-ignore]
    """Trainer with the optimizer of a case, without groups that have no parameters."""

    case: Case

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the case's optimizer over the model, wrapped or not, as the Trainer gives it."""
        made: Any = make_optimizer(self.model if model is None else model, self.case)
        if isinstance(made, list):
            raise Unsupported("a Trainer has one optimizer, and the case has two")
        made.param_groups = [one for one in made.param_groups if one["params"]]
        self.optimizer = made
        return made  # type: ignore[no-any-return]


class Trained(Accelerated):
    """Model and optimizer as a Trainer prepares them, in its loop."""

    given: ClassVar[TrainerConfig]
    keeps: ClassVar[Collection[Kept]] = RNG

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        state = torch.get_rng_state()
        super().__init__(model, case, mesh)
        torch.set_rng_state(state)  # a Trainer seeds all ranks alike, which the notes say
        ddp = ddp_in(self.built.model)
        if ddp is not None and not ddp.broadcast_buffers:
            self.semantics = replace(self.semantics, buffers="local")

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None."""
        if case.resume and case.model.user is None:
            if case.model.tied:
                return "a Trainer saves a tied weight of a PreTrainedModel alone"
            if cls.given.fsdp is None and transposed(case.model):
                return f"safetensors refuse what is not contiguous: {transposed(case.model)[0]}"
        return super().supports(case)

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Have a Trainer prepare the model, and the optimizer of the case."""
        on_cpu = mesh.device_type == "cpu"
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),
            use_cpu=on_cpu,
            report_to="none",
            disable_tqdm=True,
            **self.given.arguments,
        )
        plugin = arguments.fsdp_plugin_args
        if plugin is not None:
            plugin = plugin | _for_cases(self.given, model, case) | _on_cpu(plugin, on_cpu)
            arguments.fsdp_plugin_args = plugin
        trainer = CaseTrainer(model, arguments)
        trainer.case = case
        if plugin is not None and on_cpu:
            use_fsdp(trainer.accelerator, FullyShardedDataParallelPlugin(**plugin))
            trainer.is_fsdp_enabled = True
        prepared, _ = trainer._prepare_for_training(case.training.steps, None, None)
        self.trainer, self.accelerator = trainer, trainer.accelerator

        def clip(limit: float, kind: float) -> Any:
            return self.accelerator.clip_grad_norm_(prepared.parameters(), limit, kind)

        return Built(prepared, trainer.optimizer, clip=clip)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the Trainer's context: no reduction until the last microbatch."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        return nullcontext() if last else self.accelerator.no_sync(self.built.model)

    def backward(self, loss: torch.Tensor, weight: float, count: int) -> None:
        """Divide by the number of microbatches, as `Trainer.training_step` does."""
        self.accelerator.backward(loss / count)

    def save(self, directory: str, loader: Loader) -> Saving | None:
        """Save what the Trainer saves of model, optimizer and random states."""

        def write(place: str) -> None:
            self.trainer.save_model(place, _internal_call=True)
            self.trainer._save_optimizer_and_scheduler(place)
            self.trainer._save_rng_state(place)

        write_whole(directory, write)
        return None

    def load(self, directory: str, loader: Loader) -> None:
        """Load it in the order of `Trainer.train`. FileNotFoundError, on every rank, for none."""
        place, trainer = newest_whole(directory), self.trainer
        of_fsdp = trainer.model_wrapped if trainer.is_fsdp_enabled else None
        trainer._load_from_checkpoint(place, of_fsdp)
        trainer._load_optimizer_and_scheduler(place)
        _on_all_ranks(lambda: trainer._load_rng_state(place))

    def close(self) -> None:
        super().close()
        del self.trainer


def _on_all_ranks(act: Callable[[], None]) -> None:
    """Do what is of each rank alone; where it fails on one, no rank goes on."""
    errors: list[Exception | None] = [None] * dist.get_world_size()
    error: Exception | None = None
    try:
        act()
    except Exception as raised:
        error = raised
    dist.all_gather_object(errors, None if error is None else RuntimeError(str(error)))
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise RuntimeError(f"rank {rank} could not load: {other}")


def _on_cpu(plugin: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
    """Return options that leave out what takes an accelerator: see the notes of the config."""
    if not on_cpu:
        return {}
    of_fsdp1 = {"sync_module_states": False, "cpu_ram_efficient_loading": False}
    return {"cpu_offload": False, **(of_fsdp1 if plugin["fsdp_version"] == 1 else {})}


def _for_cases(given: TrainerConfig, model: nn.Module, case: Case) -> dict[str, Any]:
    """Return options for a drawn model, whose classes and sizes no TrainingArguments know."""
    if given.fsdp is None or case.model.user is not None:
        return {}
    if given.fsdp.policy == "size_based_wrap":
        return {"min_num_params": case.sharding.bucket}
    if given.fsdp.policy == "transformer_based_wrap":
        return {"transformer_cls_names_to_wrap": units(model)}
    return {}
