"""What becomes of TrainingArguments, and what is said of some that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerocheck.adapters.transformers.user_config import TrainerConfig, code_of, read, recognises
from zerocheck.case.codec import merged
from zerocheck.case.schema import Case
from zerocheck.catalogue import extra_of, family, place_of
from zerocheck.errors import UsageError

RECIPE = """\
# of a recipe: keys of its own stand next to TrainingArguments
model_name_or_path: meta-llama/Llama-3.1-8B
dataset_name: my/data
output_dir: out
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
learning_rate: 3e-4
lr_scheduler_type: cosine
weight_decay: 0.1
max_grad_norm: 0.5
adam_beta2: 0.95
bf16: true
gradient_checkpointing: true
fsdp: "full_shard auto_wrap"
fsdp_config:
  transformer_layer_cls_to_wrap: [LlamaDecoderLayer]
"""


@pytest.fixture
def given(tmp_path: Path) -> Any:
    """A function from TrainingArguments, or their text, to what is made of them."""

    def make(config: object) -> TrainerConfig:
        path = tmp_path / "args.yaml"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return read(str(path))

    return make


def test_a_recipe_as_it_is_written(given: Any) -> None:
    made = given(RECIPE)
    assert made.code == "fsdp2" and made.mixed == "bf16"
    case = merged(Case(), made.fixed, source="it")
    assert (case.training.clip, case.training.microbatches, case.training.norm) == (0.5, 8, "2")
    assert (case.precision.compute, case.precision.reduce) == ("bf16", "bf16")
    assert (case.optimizer.kind, case.optimizer.kernel) == ("adamw", "fused")
    *apart, rest = case.optimizer.groups
    assert [one.pattern for one in apart] == ["*bias", "*norm*"]
    assert {one.weight_decay for one in apart} == {0.0}
    assert (rest.lr, rest.beta2, rest.weight_decay) == (3e-4, 0.95, 0.1)
    assert made.arguments == {
        "bf16": True,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }
    message = "\n".join(made.notes)
    assert "args.yaml runs as FSDP2 in a Trainer" in message
    assert "left out: model_name_or_path, dataset_name: no TrainingArguments" in message
    assert "left out: lr_scheduler_type: each case sets the learning rate of each step" in message
    assert "left out: gradient_checkpointing: a PreTrainedModel checkpoints itself" in message
    assert "a Trainer seeds all ranks alike" in message
    assert 'learning_rate is text to YAML, "3e-4", and HfArgumentParser hands it' in message


def test_defaults_are_those_of_transformers(given: Any) -> None:
    made = given({"output_dir": "out"})
    assert made.code == "ddp" and made.mixed == "no" and not made.arguments
    case = merged(Case(), made.fixed, source="it")
    (group,) = case.optimizer.groups
    assert (case.training.clip, case.training.microbatches) == (1.0, 1)
    assert (group.lr, group.weight_decay, case.optimizer.kernel) == (5e-5, 0.0, "fused")


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"fsdp": True}, "fsdp2"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp1"),
        ({"fsdp": "shard_grad_op", "fsdp_config": {"fsdp_version": 1}}, "fsdp1-grad-op"),
        ({"fsdp": ["full_shard", "offload"], "fsdp_config": {}}, "fsdp2"),
        ({"fsdp": ""}, "ddp"),
        ({"ddp_broadcast_buffers": False}, "ddp"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed3"),
    ],
)
def test_what_runs(given: Any, more: dict[str, Any], code: str) -> None:
    assert given({"output_dir": "out", **more}).code == code


def test_units_and_the_form_of_checkpoints(given: Any) -> None:
    plain = given({"fsdp": True}).fsdp
    assert plain.policy == "transformer_based_wrap" and plain.full and not plain.from_rank_0
    sharded = given({"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}).fsdp
    assert not sharded.full
    offloaded = given({"fsdp": "full_shard offload"})
    assert offloaded.fsdp.offload
    assert given({"learning_rate": 1, "gradient_accumulation_steps": 64}).fixed["training"] == {
        "norm": "2",
        "clip": 1.0,
    }
    assert given({"max_grad_norm": 0}).fixed["training"]["clip"] is None


def test_auto_in_a_deepspeed_config_is_filled_in(given: Any, tmp_path: Path) -> None:
    apart = tmp_path / "ds.json"
    values = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {"stage": 2},
    }
    apart.write_text(json.dumps(values))
    config = {
        "deepspeed": str(apart),
        "learning_rate": 1e-4,
        "weight_decay": 0.2,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.7,
        "bf16": True,
    }
    made = given(config)
    case = merged(Case(), made.fixed, source="it")
    assert (case.training.clip, case.training.microbatches) == (0.7, 4)
    assert case.precision.compute == "bf16"
    (group,) = case.optimizer.groups
    assert (group.lr, group.weight_decay, group.beta1) == (1e-4, 0.2, 0.9)
    apart.write_text(json.dumps({**values, "gradient_clipping": 0.5}))
    with pytest.raises(UsageError, match=r"refuses gradient_clipping 0.5 .* max_grad_norm 0.7"):
        given({**config, "weight_decay": 0.3})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"learning_rate": 1, "graident_accumulation_steps": 2}, "did you mean 'gradient_accumul"),
        ({"learning_rate": "fast"}, 'learning_rate is "fast"; allowed: a number'),
        ({"optim": "adafactor", "learning_rate": 1}, 'optim is "adafactor", which zerocheck does'),
        ({"learning_rate": 1, "fp16": True}, "the CPU has no fp16 \\(allowed: false, left out\\)"),
        ({"learning_rate": 1, "torch_compile": True}, "its kernels round in another order"),
        ({"output_dir": "o", "fsdp_config": {"version": 2}}, "does not read fsdp_config without"),
        ({"fsdp": "full_shar"}, "fsdp is .*; allowed: true, false"),
        ({"fsdp": "hybrid_shard", "fsdp_config": {"version": 1}}, "its groups are those of nodes"),
        ({"fsdp": True, "fsdp_config": "fsdp.json"}, "it is read from one file"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "it is for TPUs"),
        (
            {"fsdp": True, "fsdp_config": {"offload_params": True}},
            "no key 'fsdp_config.fsdp_offload_params'.*a Trainer ignores it",
        ),
        ({"deepspeed": 3, "output_dir": "o"}, "the path of a DeepSpeed config, or an object"),
    ],
)
def test_what_cannot_be_used_is_refused(given: Any, config: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        given(config)


def test_they_are_known_by_their_fields(tmp_path: Path) -> None:
    """Not by those that configs of DeepSpeed or accelerate have too."""
    assert recognises({"output_dir": "out"}) and recognises({"fsdp": True})
    assert not recognises({"gradient_accumulation_steps": 2, "bf16": {"enabled": True}})
    for file, text, library, code in (
        ("a.json", '{"output_dir": "o", "fsdp": true}', "transformers", "fsdp2"),
        ("b.yml", "output_dir: o\n", "transformers", "ddp"),
        ("c.yaml", "distributed_type: MULTI_GPU\n", "accelerate", "ddp"),
        ("d.json", '{"distributed_type": "FSDP"}', "accelerate", "fsdp1"),
        ("e.json", '{"zero_optimization": {"stage": 1}}', "deepspeed", "deepspeed1"),
    ):
        path = tmp_path / file
        path.write_text(text)
        assert extra_of(str(path)) == library and f".{library}." in place_of(str(path))
        assert family(f"{path}+gather-stale")[1:] == (str(path), code)
    (tmp_path / "f.yaml").write_text("zero_stage: 2\n")
    assert extra_of(str(tmp_path / "f.yaml")) == "accelerate"
    assert code_of(str(tmp_path / "missing.yaml")) is None
