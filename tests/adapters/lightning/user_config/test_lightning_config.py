"""Sorting of a config of LightningCLI, and the messages on those that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerocheck.adapters.lightning.user_config import LightningConfig, code_of, read, recognises
from zerocheck.case.codec import merged
from zerocheck.case.schema import Case
from zerocheck.catalogue import extra_of, family, maker_of, place_of
from zerocheck.errors import UsageError

WRITTEN = """\
# lightning.pytorch==2.6.6
seed_everything: true
trainer:
  accelerator: gpu
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args:
      sharding_strategy: SHARD_GRAD_OP
      auto_wrap_policy: [my_model.Block]
      state_dict_type: sharded
      forward_prefetch: true
      cpu_offload: true
      timeout: null
  devices: 8
  num_nodes: 2
  precision: bf16-mixed
  accumulate_grad_batches: 4
  max_epochs: 3
  callbacks:
  - class_path: lightning.pytorch.callbacks.ModelCheckpoint
model:
  class_path: my_model.Module
data: null
my_own_key: 3
"""


@pytest.fixture
def given(tmp_path: Path) -> Any:
    """A function from a Trainer's arguments, or the text of a file, to what is made of them."""

    def make(config: object) -> LightningConfig:
        path = tmp_path / "trainer.yaml"
        whole = config if isinstance(config, str) else json.dumps({"trainer": config})
        path.write_text(whole)
        return read(str(path))

    return make


def of_class(name: str, **init_args: Any) -> dict[str, Any]:
    return {"strategy": {"class_path": name, "init_args": init_args}}


def test_a_file_as_the_command_line_writes_it(given: Any) -> None:
    made = given(WRITTEN)
    assert made.code == "fsdp1-grad-op" and made.precision == "bf16-mixed"
    case = merged(Case(), made.fixed, source="it")
    assert (case.training.clip, case.training.microbatches, case.training.norm) == (None, 4, "2")
    assert (case.precision.compute, case.precision.reduce) == ("bf16", "bf16")
    assert (case.sharding.wrap, case.sharding.use_orig_params) == ("block", True)
    fsdp = made.strategy.fsdp
    assert fsdp.units.classes == ("my_model.Block",) and not fsdp.full and not fsdp.flat
    assert made.strategy.passed == {"forward_prefetch": True}
    message = "\n".join(made.notes)
    assert "trainer.yaml runs as FSDP1 (SHARD_GRAD_OP) of Lightning" in message
    assert "left out: trainer.callbacks: cases take the steps, and call no callbacks" in message
    assert "left out: trainer.strategy.init_args.cpu_offload: it takes an accel" in message
    assert "left out: model: cases draw models; --model takes your own" in message
    assert "left out: my_own_key: no keys of LightningCLI itself" in message
    assert "LightningCLI seeds all ranks alike" in message
    assert "floating targets within a batch are cast" in message


def test_defaults_are_those_of_lightning(given: Any) -> None:
    made = given({})
    assert made.code == "ddp" and made.precision == "32-true" and made.strategy.kind == "auto"
    case = merged(Case(), made.fixed, source="it")
    assert (case.training.clip, case.training.microbatches) == (None, 1)
    assert case.precision.compute == "fp32"


@pytest.mark.parametrize(
    ("trainer", "code"),
    [
        ({"strategy": "ddp_find_unused_parameters_true"}, "ddp"),
        ({"strategy": "DDP_SPAWN"}, "ddp"),
        (of_class("pytorch_lightning.strategies.DDPStrategy", static_graph=True), "ddp"),
        ({"strategy": "fsdp"}, "fsdp1"),
        ({"strategy": "fsdp_cpu_offload"}, "fsdp1"),
        (of_class("FSDPStrategy", sharding_strategy="NO_SHARD"), "fsdp1-no-shard"),
        ({"strategy": "deepspeed_stage_3"}, "deepspeed3"),
        ({"strategy": "deepspeed_stage_2_offload", "gradient_clip_val": 0.5}, "deepspeed2"),
        (of_class("DeepSpeedStrategy", stage=1), "deepspeed1"),
        (of_class("DeepSpeedStrategy", zero_optimization=False), "deepspeed0"),
        (of_class("DeepSpeedStrategy", config={"zero_optimization": {"stage": 3}}), "deepspeed3"),
    ],
)
def test_strategies_by_name_and_by_class(given: Any, trainer: dict[str, Any], code: str) -> None:
    assert given(trainer).code == code


def test_a_file_of_subcommands(given: Any) -> None:
    made = given("fit:\n  trainer:\n    strategy: ddp\n    gradient_clip_val: 2\n")
    assert made.fixed["training"] == {"norm": "2", "clip": 2.0, "microbatches": 1}


def test_many_microbatches_are_drawn(given: Any) -> None:
    made = given({"accumulate_grad_batches": 64})
    assert "microbatches" not in made.fixed["training"]
    assert any("drawn: accumulate_grad_batches" in one for one in made.notes)


def test_the_config_that_deepspeed_is_given(given: Any) -> None:
    made = given({"strategy": "deepspeed_stage_2", "gradient_clip_val": 0.5, "precision": "bf16"})
    assert made.deepspeed is not None and made.deepspeed.stage == 2
    case = merged(Case(), made.fixed, source="it")
    assert (case.training.clip, case.training.microbatches) == (0.5, 1)
    assert case.precision.compute == "bf16"
    assert given({"strategy": "deepspeed"}).fixed["training"]["clip"] is None


def test_a_policy_by_size_and_one_of_torch(given: Any) -> None:
    size = "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy"
    assert given(of_class("FSDPStrategy", auto_wrap_policy=size)).fixed["sharding"]["wrap"] == (
        "size"
    )
    policy = {
        "class_path": "torch.distributed.fsdp.wrap.ModuleWrapPolicy",
        "init_args": {"module_classes": ["my.Block"]},
    }
    made = given(of_class("FSDPStrategy", activation_checkpointing_policy=policy))
    assert made.strategy.fsdp.checkpointing.classes == ("my.Block",)
    assert made.strategy.fsdp.units.kind == "whole"


def test_an_argument_that_is_not_read_is_noted(given: Any) -> None:
    notes = given({"gradient_clip_algorithm": "value"}).notes
    assert any("does not read gradient_clip_algorithm without" in one for one in notes)


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"accumulate_grad_batch": 2}, "did you mean 'accumulate_grad_batches'"),
        ({"strategy": "dpp"}, "trainer.strategy is \"dpp\"; did you mean 'ddp'"),
        ({"strategy": 3}, "trainer.strategy is 3; allowed: the name of a strategy"),
        (of_class("DDPStrategy", find_unused_params=True), "did you mean 'find_unused_parameters'"),
        (of_class("FDSPStrategy"), "did you mean 'FSDPStrategy'"),
        (of_class("my_strategies.Mine"), "zerocheck run path/to/file.py:NAME"),
        (of_class("ModelParallelStrategy"), "it shards nothing itself, the model's configure_m"),
        ({"strategy": "single_device"}, "it trains in one process, where nothing is sharded"),
        ({"strategy": "xla"}, "it is for TPUs"),
        ({"strategy": "deepspeed_stage_3_offload_nvme"}, "it takes NVMe"),
        ({"strategy": "fsdp", "accelerator": "cpu"}, "it requires a GPU accelerator"),
        ({"strategy": "deepspeed", "accelerator": "cpu"}, "only supported on CUDA GPUs"),
        ({"accelerator": "tpu"}, "it is out of scope"),
        ({"accelerator": "gpus"}, "did you mean 'gpu'"),
        ({"strategy": "fsdp", "gradient_clip_val": 1}, "currently not supported for `FSDPPreci"),
        ({"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}, "the norm of gradients alo"),
        ({"gradient_clip_val": 1, "gradient_clip_algorithm": "nrom"}, "did you mean 'norm'"),
        ({"precision": "16-mixed"}, "the CPU has no fp16"),
        ({"precision": "bf16-true"}, "makes parameters and optimizer states of your model bf16"),
        ({"precision": "bf16-mixd"}, "did you mean 'bf16-mixed'"),
        ({"sync_batchnorm": True}, "statistics of all ranks"),
        ({"plugins": [{"class_path": "my.Plugin"}]}, "plugins replace parts of what is checked"),
        (of_class("DDPStrategy", ddp_comm_hook="my.hook"), "registers hooks on CUDA alone"),
        (of_class("DDPStrategy", model_averaging_period=4), "models differ on purpose"),
        (of_class("FSDPStrategy", sharding_strategy="HYBRID_SHARD"), "groups are those of nodes"),
        (of_class("FSDPStrategy", sharding_strategy="FULL"), "did you mean 'FULL_SHARD'"),
        (of_class("FSDPStrategy", auto_wrap_policy="my.policy"), "a list of paths of classes"),
        (of_class("FSDPStrategy", state_dict_type="local"), 'allowed: "full", "sharded"'),
        ({"strategy": "deepspeed", "accumulate_grad_batches": 2}, "the engine does so again"),
        (
            of_class("DeepSpeedStrategy", config={"gradient_accumulation_steps": 2}),
            "Lightning refuses gradient_accumulation_steps in a DeepSpeed config",
        ),
    ],
)
def test_errors_say_what_and_why(given: Any, trainer: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        given(trainer)
    assert words in str(raised.value), raised.value


def test_a_misspelt_key_beside_the_trainer(given: Any) -> None:
    with pytest.raises(UsageError, match="did you mean 'seed_everything'"):
        given("seed_everthing: 1\ntrainer: {}\n")


def test_a_misspelt_section(given: Any) -> None:
    with pytest.raises(UsageError, match="did you mean 'trainer'"):
        given("seed_everything: 1\ntrianer: {}\n")


def test_a_file_is_known_by_its_section(tmp_path: Path) -> None:
    assert recognises({"seed_everything": 1, "trianer": {}})
    assert recognises({"trainer": {}}) and recognises({"fit": {"trainer": {}}})
    assert not recognises({"fit": 1}) and not recognises({"strategy": "ddp"})
    path = tmp_path / "trainer.yaml"
    path.write_text("trainer:\n  strategy: fsdp\n")
    assert place_of(str(path)) == "zerocheck.adapters.lightning.implementation:of_file"
    assert extra_of(str(path)) == "lightning"
    assert family(str(path)) == (str(path), "fsdp1")
    path.write_text("trainer:\n  strategy: fsdpp\n")
    assert code_of(str(path)) is None


def test_objects_are_known_by_the_package_of_their_class() -> None:
    base = type("DDPStrategy", (), {"__module__": "lightning.pytorch.strategies.ddp"})
    own = type("Own", (base,), {"__module__": "my_strategies"})
    place = "zerocheck.adapters.lightning.given_strategy:of_object"
    assert maker_of(base()) == maker_of(own()) == maker_of(own) == place
    assert maker_of({}) is maker_of(dict) is maker_of(None) is None
