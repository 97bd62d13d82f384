"""Trainers as people have them, on a GPU, with zerocheck's callback: DDP, FSDP1 and FSDP2.

torchrun --nproc-per-node N trainers_on_gpu.py TRAINER SHARDING PRECISION [FAULT]

TRAINER: transformers, accelerate or lightning; SHARDING: ddp, fsdp1 or fsdp2; PRECISION: fp32 or
bf16; FAULT: doubled, for gradients that are doubled from step 2 on. Ranks share a GPU where there
are fewer. With tests/field in PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

RANKS = int(os.environ["WORLD_SIZE"])
import torch  # noqa: E402

SHARED = torch.cuda.device_count() < RANKS
if SHARED:
    os.environ["LOCAL_RANK"] = "0"  # all trainers take the GPU of this number

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from trainer_faults import line  # noqa: E402

BACKEND = "cpu:gloo,cuda:gloo" if SHARED else "nccl"
OPTIONS: dict[str, Any] = {"steps": (1, 2, 3, 4), "every": None, "on_violation": "warn"}
FAULT = 2
"""The step with which a fault begins."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def double(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)


def transformers(sharding: str, narrow: bool, fault: bool) -> Any:
    import transformers

    from zerocheck.integrations.transformers import check

    def make_model() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=61,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=32,
            )
        )

    class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(61, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids.clone()}

    class Trainer(transformers.Trainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().training_step(model, *args, **kwargs)
            last = self.accelerator.sync_gradients
            if fault and last and self.state.global_step + 1 >= FAULT:
                double(model)
            return result

    more: dict[str, Any] = {}
    if sharding != "ddp":
        names = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        more = {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"fsdp_version": int(sharding[-1]), **names},
        }
    trainer = Trainer(
        make_model(),
        transformers.TrainingArguments(
            tempfile.mkdtemp(),
            ddp_backend=BACKEND if SHARED else None,
            bf16=narrow,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            learning_rate=1e-2,
            **more,
        ),
        train_dataset=Tokens(),
    )
    callback = check(trainer, reference=make_model, **OPTIONS)
    trainer.train()
    return callback.attached


def accelerate(sharding: str, narrow: bool, fault: bool) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, InitProcessGroupKwargs

    from zerocheck.integrations.accelerate import check

    plugin = None
    if sharding != "ddp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(sharding[-1]),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            use_orig_params=True,
        )
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision="bf16" if narrow else "no",
        fsdp_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend=BACKEND)],
    )
    model: Any = make_net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randn(128, 32, generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(batches, 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attached = check(accelerator, reference=make_net, **OPTIONS)
    taken = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
                if fault and taken + 1 >= FAULT:
                    double(model)
            optimizer.step()
            optimizer.zero_grad()
        taken += accelerator.sync_gradients
        if taken == 4:
            break
    return attached


def lightning(sharding: str, narrow: bool, fault: bool) -> Any:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

    from zerocheck.integrations.lightning import LightningCheck

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def training_step(self, batch: torch.Tensor, index: int) -> dict[str, torch.Tensor]:
            outputs = self.net(batch)
            return {"loss": outputs.square().mean(), "outputs": outputs}

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Fault(lightning.Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            last = not trainer.fit_loop._should_accumulate()
            if fault and last and trainer.global_step + 1 >= FAULT:
                double(module)

    strategy: Any = DDPStrategy(process_group_backend=BACKEND)
    if sharding != "ddp":
        strategy = FSDPStrategy(auto_wrap_policy={Block}, process_group_backend=BACKEND)
    callback = LightningCheck(reference=Module, **OPTIONS)
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1 if SHARED else RANKS,
        num_nodes=RANKS if SHARED else 1,
        strategy=strategy,
        precision="bf16-mixed" if narrow else "32-true",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        callbacks=[callback, Fault()],
    )
    batches = torch.randn(128, 32, generator=torch.Generator().manual_seed(1))
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, 4))
    return callback.attached


TRAINERS = {"transformers": transformers, "accelerate": accelerate, "lightning": lightning}

if __name__ == "__main__":
    trained, sharded, precision, *faults = sys.argv[1:]
    check = TRAINERS[trained](sharded, precision == "bf16", bool(faults))
    if dist.get_rank() == 0:
        print(line(check), flush=True)
    dist.destroy_process_group()
