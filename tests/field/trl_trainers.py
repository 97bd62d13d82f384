"""Trainers of TRL on CPU ranks, with LoRA too, checked by zerocheck.integrations.transformers.

torchrun --nproc-per-node 2 trl_trainers.py --kind sft --lora
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_faults import Planted, asked, checks, line
from transformers_trainer import Faulty
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from zerocheck.integrations.transformers import check

WORDS = 58
PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
_random = random.Random(0)


def make_model(kind: str = "causal") -> Any:
    """With dropout, which DPO turns off."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS + 3,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        pad_token_id=WORDS,
        bos_token_id=WORDS + 1,
        eos_token_id=WORDS + 1,
        num_labels=1,
    )
    if kind == "reward":
        return transformers.GPT2ForSequenceClassification(config)
    return transformers.GPT2LMHeadModel(config)


def tokenizer() -> Any:
    """A word is a token."""
    vocabulary = {f"w{number}": number for number in range(WORDS)}
    vocabulary.update({name: WORDS + number for number, name in enumerate((PAD, END, UNKNOWN))})
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
    )


def text(least: int, most: int) -> str:
    return " ".join(f"w{_random.randrange(WORDS)}" for _ in range(_random.randrange(least, most)))


def rows(**columns: tuple[int, int]) -> Dataset:
    """Samples with texts of these lengths."""
    made = [{name: f" {text(*lengths)}" for name, lengths in columns.items()} for _ in range(64)]
    return Dataset.from_list(made)


class FaultySFT(SFTTrainer, Faulty):
    pass


class FaultyDPO(DPOTrainer, Faulty):
    pass


class FaultyReward(RewardTrainer, Faulty):
    pass


def made(kind: str, lora: bool, options: dict[str, Any]) -> Any:
    """The trainer of a kind."""
    shared: dict[str, Any] = {"processing_class": tokenizer()}
    if lora:
        layers = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        shared["peft_config"] = LoraConfig(
            r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type=layers
        )
    if kind == "dpo":
        pairs = rows(prompt=(4, 9), chosen=(3, 9), rejected=(3, 9))
        if not lora:
            shared["ref_model"] = make_model()
        return FaultyDPO(make_model(), args=DPOConfig(**options), train_dataset=pairs, **shared)
    if kind == "reward":
        pairs = rows(chosen=(3, 19), rejected=(3, 19))
        return FaultyReward(
            make_model(kind), args=RewardConfig(**options), train_dataset=pairs, **shared
        )
    texts = rows(text=(5, 30))
    return FaultySFT(make_model(), args=SFTConfig(**options), train_dataset=texts, **shared)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--kind", choices=("sft", "dpo", "reward"), default="sft")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--neftune", action="store_true")
    own, others = parser.parse_known_args()
    given = asked(others)
    trainer = made(
        own.kind,
        own.lora,
        {
            "output_dir": tempfile.mkdtemp(),
            "use_cpu": True,
            "bf16": given.bf16,
            "torch_compile": given.compile,
            "max_steps": given.steps,
            "max_length": 32,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": given.accumulation,
            "gradient_checkpointing": False,
            "neftune_noise_alpha": 5.0 if own.neftune else None,
            "report_to": [],
            "save_strategy": "no",
            "learning_rate": 1e-2,
        },
    )
    trainer.planted = Planted(given)
    callback = check(
        trainer,
        reference=None if given.no_reference else lambda: make_model(own.kind),
        **checks(given),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(line(callback.attached), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()  # else threads of gloo may outlive the interpreter
