"""transformers.Trainer on CPU ranks, checked by zerocheck.integrations.transformers.

torchrun --nproc-per-node 2 transformers_trainer.py --accumulation 2
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from trainer_faults import Planted, asked, checks, line

from zerocheck import Semantics
from zerocheck.integrations.transformers import check


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(61, (8,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 5] = -100  # ranks have other numbers of tokens
        return {"input_ids": ids, "labels": labels}


class Faulty(transformers.Trainer):
    planted: Planted

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self.planted.trained(
            model, lambda: super(Faulty, self).training_step(model, *args, **kwargs)
        )


if __name__ == "__main__":
    given = asked()
    trainer = Faulty(
        make_model(),
        transformers.TrainingArguments(
            given.saves or tempfile.mkdtemp(),
            use_cpu=True,
            bf16=given.bf16,
            torch_compile=given.compile,
            # For its loss the Trainer takes DDP out of the compiled model.
            label_smoothing_factor=0.1 if given.compile else 0.0,
            max_steps=given.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=given.accumulation,
            ddp_find_unused_parameters=given.unused,
            report_to=[],
            save_strategy="steps" if given.saves else "no",
            save_steps=2,
            learning_rate=1e-2,
            optim="adamw_torch",
            weight_decay=0.1,
            max_grad_norm=0.5,
            average_tokens_across_devices=given.fault != "own tokens",
        ),
        train_dataset=Tokens(),
    )
    trainer.planted = Planted(given)
    if given.fault == "mean of means":  # as before transformers 4.46, and for models without it
        trainer.model_accepts_loss_kwargs = False
    callback = given.unchecked or check(
        trainer,
        reference=None if given.no_reference else make_model,
        semantics=Semantics(weight="token") if given.tokens else None,
        **checks(given),
    )
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=given.resume)
    if trainer.is_world_process_zero():
        print(f"SECONDS {time.perf_counter() - started:.3f}")
        print(line(None if given.unchecked else callback.attached), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()  # else threads of gloo may outlive the interpreter
