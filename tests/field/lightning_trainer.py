"""Lightning's Trainer with DDP on CPU ranks, checked by zerocheck.integrations.lightning.

torchrun --nproc-per-node 2 lightning_trainer.py --accumulation 2
"""

from __future__ import annotations

import os
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from trainer_faults import Planted, asked, checks, line

from zerocheck.integrations.lightning import LightningCheck


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def training_step(self, batch: torch.Tensor, index: int) -> dict[str, torch.Tensor]:
        outputs = self.net(batch)
        loss = outputs.square().mean()
        self.log("loss", loss)
        return {"loss": loss, "outputs": outputs}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Plant(lightning.Callback):
    """A fault in the gradients, before they are clipped."""

    def __init__(self, planted: Planted) -> None:
        self.planted = planted

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.planted.now == "not reduced":
            trainer.strategy.model.require_backward_grad_sync = False

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.planted.trained(module, lambda: None)


if __name__ == "__main__":
    given = asked()
    batches = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    saving = []
    if given.saves:
        saving = [ModelCheckpoint(given.saves, "{step}", save_top_k=-1, every_n_train_steps=2)]
    callback = LightningCheck(reference=None if given.no_reference else Module, **checks(given))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp_find_unused_parameters_true" if given.unused else "ddp",
        precision="bf16-mixed" if given.bf16 else "32-true",
        max_steps=given.steps,
        logger=False,
        enable_checkpointing=bool(given.saves),
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.05,
        accumulate_grad_batches=given.accumulation,
        callbacks=[*([] if given.unchecked else [callback]), Plant(Planted(given)), *saving],
    )
    started = time.perf_counter()
    resumed = f"{given.saves}/step=2.ckpt" if given.resume else None
    module: Any = Module()
    if given.compile:  # the module as a whole is refused by dynamo, for `self.log`
        module.net = torch.compile(module.net)
    trainer.fit(module, torch.utils.data.DataLoader(batches, 4), ckpt_path=resumed)
    if trainer.is_global_zero:
        print(f"SECONDS {time.perf_counter() - started:.3f}")
        print(line(None if given.unchecked else callback.attached), flush=True)
