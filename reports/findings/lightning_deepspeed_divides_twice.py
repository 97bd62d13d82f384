"""torch, Lightning and DeepSpeed only: accumulated gradients are divided twice by their number.

    python lightning_deepspeed_divides_twice.py

Every batch has the gradient 1.0, so the mean over batches is 1.0. SGD with lr 1 shows it in the
parameters. Lightning takes DeepSpeed on GPUs alone, so its accelerator passes for one; its loop of
automatic optimization is called as `fit` does.
"""

import os
import sys
import tempfile
import warnings
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import lightning
import lightning.pytorch.strategies.deepspeed as lightning_deepspeed
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))


class OnCpu(CUDAAccelerator):
    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cpu", 0)] * devices

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer: lightning.Trainer) -> None:
        pass


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def update(batches: int) -> float:
    """Take one step over so many batches, and return what is subtracted from the weight."""
    trainer = lightning.Trainer(
        accelerator=OnCpu(),
        devices=1,
        strategy=DeepSpeedStrategy(stage=1, logging_batch_size_per_gpu=1),
        plugins=[LightningEnvironment()],
        accumulate_grad_batches=batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=-1,
    )
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    module = Module()
    module.trainer = trainer
    trainer.strategy.connect(module)
    trainer.strategy.setup_environment()
    trainer.strategy.setup(trainer)
    before = module.net.weight.item()
    loop = trainer.fit_loop.epoch_loop
    for index in range(batches):
        loop.batch_progress.increment_ready()
        given = {"batch": torch.ones(1, 1), "batch_idx": index}
        loop.automatic_optimization.run(trainer.optimizers[0], index, given)
    return round(before - module.net.weight.item(), 4)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    lightning_deepspeed._validate_device_index_selection = lambda devices: None
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        updates = {batches: update(batches) for batches in (1, 4)}
        dist.destroy_process_group()
    for batches, found in updates.items():
        print(f"accumulate_grad_batches={batches}: the weight changes by {found}, right is 1.0")
    sys.exit(0 if updates[4] == 1.0 else 1)
