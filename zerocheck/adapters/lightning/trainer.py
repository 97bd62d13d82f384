"""Lightning's Trainer in a rank process, with the model of a case.

The Trainer makes strategy, precision and loop of its arguments. `fit` would start processes, read
data and handle signals; what it does of the rest before the first step is done here, in its order.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from ...case.schema import Case
from ...contract.groups import make_optimizer
from ...contract.implementation import Loader, Microbatch, Step
from ...contract.names import register
from ...errors import Unsupported
from ...machine.devices import placed

for _name in ("lightning.pytorch", "lightning.fabric", "lightning"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # hints on GPUs that are not used


class RankEnvironment(ClusterEnvironment):  # type: ignore[misc,unused-ignore]
    """Processes of Lightning that are zerocheck's ranks, which are connected already."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts none."""
        return True

    @property
    def main_address(self) -> str:
        """Address of rank 0, which is not used."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Port of rank 0, which is not used."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False: it is given to the Trainer."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the ranks are there."""

    def global_rank(self) -> int:
        """Return the number of this rank."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the ranks are there."""

    def local_rank(self) -> int:
        """Return the number of this rank, as all are on one node."""
        return dist.get_rank()

    def node_rank(self) -> int:
        """Return the number of the one node."""
        return 0


class Uncast:
    """Microbatch in a wrapper that FSDP does not look into, where it would cast the target."""

    def __init__(self, microbatch: Microbatch) -> None:
        self.microbatch = microbatch


class CaseModule(LightningModule):  # type: ignore[misc,unused-ignore]
    """Module that has the parts of a case's model under the same names."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        super().__init__()
        self._called = (model,)  # in a tuple it is no part of this module
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._case = case
        self.step_taken: Step | None = None
        self.loader: Loader | None = None

    def training_step(
        self, inputs: tuple[torch.Tensor, ...], batch: Uncast, batch_idx: int
    ) -> torch.Tensor:
        """Return the loss, which Lightning divides by the number of microbatches.

        inputs: of the microbatch, as the wrapper around this module hands them on.
        """
        return replace(batch.microbatch, inputs=inputs).loss(*self._called)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the case's optimizer over the wrapped model, without groups that are empty."""
        made: Any = make_optimizer(self.trainer.strategy.model, self._case)
        if isinstance(made, list):
            raise Unsupported("a Trainer takes the steps of one optimizer, and the case has two")
        made.param_groups = [one for one in made.param_groups if one["params"]]
        return made  # type: ignore[no-any-return]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Reset gradients as the case asks for it."""
        optimizer.zero_grad(set_to_none=self._case.training.set_to_none)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Show the reduced gradients, which are not clipped yet."""
        assert self.step_taken is not None
        self.step_taken.reached("reduced")

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as Lightning does by default, and show the result."""
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if gradient_clip_val is not None:
            assert self.step_taken is not None
            self.step_taken.reached("clipped")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the position in the data, as modules keep what is theirs."""
        if self.loader is not None:
            checkpoint["loader"] = self.loader.state_dict()

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Go to the position in the data."""
        if self.loader is not None:
            self.loader.load_state_dict(checkpoint["loader"])


class RankAccelerator(CUDAAccelerator):  # type: ignore[misc,unused-ignore]
    """Accelerator of GPUs on the device that a rank has, which may be the CPU.

    The Trainer takes FSDP with an accelerator of this class alone.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @staticmethod
    def is_available() -> bool:
        """Return True: the rank has its device."""
        return True

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Return the number of ranks, as it was given."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return the device of each rank, which each takes for its own."""
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return [placed(kind)] * devices

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: the rank has chosen its device."""

    def setup(self, trainer: Trainer) -> None:
        """Do nothing: these are settings of CUDA."""

    def teardown(self) -> None:
        """Do nothing: other cases follow in this process."""


class OnCpuPrecision(FSDPPrecision):  # type: ignore[misc,unused-ignore]
    """Precision of FSDP with autocast for the CPU, where Lightning has it for CUDA."""

    def forward_context(self) -> Any:
        """Return the context of a forward."""
        if "mixed" in self.precision:
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return super().forward_context()


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Have FSDP take the CPU for its device: of it Lightning has no index, and gives it None."""
    made: Any = FullyShardedDataParallel.__init__

    def init(self: Any, *given: Any, **more: Any) -> None:
        if more.get("device_id") is None:
            more["device_id"] = torch.device("cpu")
        made(self, *given, **more)

    of_class: Any = FullyShardedDataParallel
    of_class.__init__ = init
    try:
        yield
    finally:
        of_class.__init__ = made


def trainer_for(
    model: nn.Module, case: Case, mesh: DeviceMesh, strategy: str | Strategy, precision: Any
) -> Trainer:
    """Return a Trainer that has prepared model and optimizer of a case, as `fit` does."""
    module = CaseModule(model, case)
    register(module)
    on_cpu = mesh.device_type == "cpu"
    fsdp = strategy == "fsdp" or isinstance(strategy, FSDPStrategy)
    plugins: list[ClusterEnvironment | Precision] = [RankEnvironment()]
    if fsdp and on_cpu:
        plugins.append(OnCpuPrecision(precision))
    trainer = Trainer(
        accelerator="cpu" if on_cpu and not fsdp else RankAccelerator(placed(mesh.device_type)),
        devices=case.world_size,
        strategy=strategy,
        precision=None if fsdp and on_cpu else precision,
        plugins=plugins,
        accumulate_grad_batches=case.training.microbatches,
        gradient_clip_val=case.training.clip,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.training = True
    module.trainer = trainer
    trainer.strategy.connect(module)
    with fsdp_on_cpu() if fsdp and on_cpu else nullcontext():
        trainer.strategy.setup_environment()
        call._call_configure_model(trainer)
        trainer.strategy.setup(trainer)
    return trainer


def take_step(trainer: Trainer, step: Step) -> None:
    """Take one step by the loop of automatic optimization."""
    loop: Any = trainer.fit_loop.epoch_loop
    module: Any = trainer.lightning_module
    module.step_taken = step
    for index, microbatch in enumerate(step.microbatches):
        loop.batch_progress.increment_ready()
        loop.batch_progress.increment_started()
        given = {"inputs": microbatch.inputs, "batch": Uncast(microbatch), "batch_idx": index}
        loop.automatic_optimization.run(trainer.optimizers[0], index, given)
        loop.batch_progress.increment_processed()
        loop.batch_progress.increment_completed()


def save(trainer: Trainer, path: str, loader: Loader) -> None:
    """Save by `Trainer.save_checkpoint`, with the position in the data."""
    _module_of(trainer).loader = loader
    trainer.save_checkpoint(path)


def load(trainer: Trainer, path: str, loader: Loader) -> None:
    """Load as `fit(ckpt_path=...)` does, into a model that is wrapped already."""
    _module_of(trainer).loader = loader
    connector: Any = trainer._checkpoint_connector
    connector._restore_modules_and_callbacks(path)
    connector.restore_training_state()
    connector.resume_end()


def _module_of(trainer: Trainer) -> CaseModule:
    module = trainer.lightning_module
    assert isinstance(module, CaseModule)
    return module
