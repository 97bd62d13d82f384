"""Implementation made from the user's config: what `accelerate launch` and `prepare` make of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...case.schema import Case
from ...contract import Semantics
from ...contract.build import Built, BuiltImplementation
from ...contract.groups import make_optimizer
from ...contract.implementation import Implementation, Kept, Loader, Saving
from ..shared.config_class import class_for
from ..shared.exports import export_of
from ..shared.limits import contradiction
from ..shared.units import block_classes
from . import checkpoint
from .launch import environment_of, forget, put_back, use_fsdp
from .refusals import FREED, refusal
from .user_config import AccelerateConfig, read


def of_file(name: str) -> type[Implementation]:
    """Make the class of a config of accelerate.

    Raises UsageError as `user_config.read` does.
    """
    return class_for(read(name), partial(class_of, Accelerated))


def class_of(kind: type[Accelerated], given: AccelerateConfig) -> type[Implementation]:
    """Make the class of this kind for a config of DDP or FSDP."""
    fsdp = given.fsdp
    attributes: dict[str, Any] = {
        "given": given,
        "fixed": given.fixed,
        # SHARD_GRAD_OP has parameters sharded between steps too.
        "stage": 0 if fsdp is None or fsdp.strategy == "no_shard" else 3,
        "options": ("bucket",) if fsdp is not None and fsdp.policy == "size_based_wrap" else (),
        "without": _without(given),
        "capabilities": frozenset({"precision"} if given.mixed == "bf16" else ()),
    }
    if fsdp is not None and fsdp.version == 1 and not torch.accelerator.is_available():
        attributes["export"] = Implementation.export  # it offloads what is on the CPU: see use_fsdp
    return type(f"{kind.__name__}Config", (kind,), attributes)


class Accelerated(BuiltImplementation):
    """Model and optimizer as accelerate prepares them, in the loop of its documentation."""

    given: ClassVar[AccelerateConfig]
    keeps: ClassVar[Collection[Kept]] = ("data", "rng")

    @classmethod
    def supports(cls, case: Case) -> str | None:
        """Return the reason to reject this case, or None. The config may contradict the case."""
        return contradiction(cls.given.name, cls.given.fixed, case) or refusal(cls.given, case)

    def __init__(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> None:
        self.semantics = _semantics(self.given, case)
        before = dict(os.environ)
        forget()
        try:
            super().__init__(model, case, mesh)
        finally:
            put_back(before)

    def build(self, model: nn.Module, case: Case, mesh: DeviceMesh) -> Built:
        """Prepare the model, and an optimizer of the case's groups, as accelerate does."""
        self.accelerator = self.accelerated(model, case, on_cpu=mesh.device_type == "cpu")
        if self.given.fsdp is not None and self.given.fsdp.flat:
            # The optimizer has to be given the flat parameters, which are there after this.
            prepared = self.accelerator.prepare(model)
            optimizers = [self.accelerator.prepare(one) for one in _optimizers(prepared, case)]
        else:
            prepared, *optimizers = self.accelerator.prepare(model, *_optimizers(model, case))

        def clip(limit: float, kind: float) -> Any:
            return self.accelerator.clip_grad_norm_(prepared.parameters(), limit, kind)

        return Built(prepared, optimizers if len(optimizers) > 1 else optimizers[0], clip=clip)

    def accelerated(self, model: nn.Module, case: Case, *, on_cpu: bool) -> Accelerator:
        """Start accelerate with the environment that `accelerate launch` makes of the config."""
        environment = environment_of(self.given.name, case.world_size)
        environment |= _for_cases(self.given, model, case)
        if on_cpu:
            environment |= _on_cpu(self.given)
        os.environ.update(environment)
        accelerator = Accelerator(
            cpu=on_cpu, gradient_accumulation_steps=case.training.microbatches
        )
        if on_cpu and self.given.fsdp is not None:
            use_fsdp(accelerator, FullyShardedDataParallelPlugin())
        return accelerator

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return accelerate's own context, which counts microbatches by itself."""
        return self.accelerator.accumulate(self.built.model)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, weight: float, count: int) -> None:
        """Call accelerate's backward, which divides by the number of microbatches."""
        self.accelerator.backward(loss)

    def save(self, directory: str, loader: Loader) -> Saving | None:
        """Save by `save_state`."""
        checkpoint.save(self.accelerator, directory, loader)
        return None

    def load(self, directory: str, loader: Loader) -> None:
        """Load by `load_state`."""
        checkpoint.load(self.accelerator, directory, loader)

    def export(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Export the parameters and buffers of `get_state_dict`, which rank 0 has."""
        state = self.accelerator.get_state_dict(self.built.model)
        if dist.get_rank() or state is None:
            return {}
        return export_of(state, self.names, self.built.model)

    def close(self) -> None:
        super().close()
        del self.accelerator
        forget()


def _without(given: AccelerateConfig) -> dict[str, str]:
    """Return the obligations that no case can exercise, and why."""
    without = {}
    if given.mixed == "bf16" and given.fsdp is not None:
        without["buffers"] = "FSDP casts batch norms to bf16, which torch on the CPU cannot run"
    if given.fsdp is not None and given.fsdp.version == 1 and not torch.accelerator.is_available():
        without["export"] = FREED
        if given.fsdp.full:
            of_resume = ("roundtrip", "continuation", "durability", "damage")
            without |= dict.fromkeys(of_resume, FREED)
    return without


def _optimizers(model: nn.Module, case: Case) -> list[torch.optim.Optimizer]:
    made = make_optimizer(model, case)
    return made if isinstance(made, list) else [made]


def _semantics(given: AccelerateConfig, case: Case) -> Semantics:
    """Return what accelerate means by a step: torch's defaults, under autocast in bf16."""
    plain = Semantics(buffers="rank0" if given.fsdp is None else "local")
    if case.precision.compute == "fp32":
        return plain
    if given.fsdp is None:
        return replace(plain, compute="bf16", precision_mode="autocast")
    summed: Any = "bf16" if given.fsdp.version == 2 else "own"
    return replace(
        plain,
        compute="bf16",
        precision_mode="cast_and_autocast",
        inputs="cast",
        outputs="cast" if given.fsdp.version == 2 else "kept",
        accumulate_dtype=summed,
        reduce="bf16",
    )


def _on_cpu(given: AccelerateConfig) -> Mapping[str, str]:
    """Return variables that leave out what takes an accelerator: see the notes of the config."""
    left_out = ["FSDP_OFFLOAD_PARAMS"]
    if given.fsdp is not None and given.fsdp.version == 1:
        left_out += ["FSDP_SYNC_MODULE_STATES", "FSDP_CPU_RAM_EFFICIENT_LOADING"]
    return dict.fromkeys(left_out, "false")


def _for_cases(given: AccelerateConfig, model: nn.Module, case: Case) -> Mapping[str, str]:
    """Return variables for a drawn model, whose classes and sizes no config of a user knows."""
    if given.fsdp is None or case.model.user is not None:
        return {}
    if given.fsdp.policy == "size_based_wrap":
        return {"FSDP_MIN_NUM_PARAMS": str(case.sharding.bucket)}
    if given.fsdp.policy != "transformer_based_wrap":
        return {}
    return {"FSDP_TRANSFORMER_CLS_TO_WRAP": ",".join(units(model))}


def units(model: nn.Module) -> list[str]:
    """Return the names of the classes of a drawn model's blocks; that of the model if none."""
    return sorted(one.__name__ for one in block_classes(model) or {type(model)})
