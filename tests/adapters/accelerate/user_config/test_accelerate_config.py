"""What becomes of a config of accelerate, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerocheck.adapters.accelerate.user_config import AccelerateConfig, code_of, read, recognises
from zerocheck.case.codec import merged
from zerocheck.case.schema import Case
from zerocheck.errors import UsageError

WRITTEN = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""As `accelerate config` writes it."""


LAUGHS = "a0: &a0 [1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20)
)
"""Aliases within aliases: 10 to the 19th values."""


@pytest.fixture
def given(tmp_path: Path) -> Any:
    """A function from a config, or its text, to what is made of it."""

    def make(config: object) -> AccelerateConfig:
        path = tmp_path / "fsdp.yaml"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return read(str(path))

    return make


def fsdp(**keys: Any) -> dict[str, Any]:
    return {
        "distributed_type": "FSDP",
        "mixed_precision": False,
        "fsdp_config": {f"fsdp_{key}": one for key, one in keys.items()},
    }


def test_a_config_as_it_is_written(given: Any) -> None:
    made = given(WRITTEN)
    assert made.code == "fsdp2" and made.mixed == "bf16" and made.deepspeed is None
    assert made.fsdp is not None and made.fsdp.checkpointing and made.fsdp.from_rank_0
    assert not made.fsdp.flat and not made.fsdp.full and made.fsdp.offload
    case = merged(Case(), made.fixed, source="it")
    assert (case.precision.compute, case.precision.reduce) == ("bf16", "bf16")
    assert (case.sharding.wrap, case.training.norm) == ("block", "2")
    message = "\n".join(made.notes)
    assert "fsdp.yaml runs as FSDP2 of accelerate" in message
    assert "left out: fsdp_offload_params: it takes an accelerator" in message
    assert "accelerate has FSDP reduce gradients in bf16 too" in message
    assert "units are the blocks in drawn models" in message


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"distributed_type": "MULTI_GPU"}, "ddp", "runs as DDP of accelerate"),
        ({"distributed_type": "NO", "mixed_precision": "bf16"}, "ddp", "as DDP"),
        (fsdp(), "fsdp1", "runs as FSDP1 (FULL_SHARD)"),
        (fsdp(version=1, sharding_strategy=2), "fsdp1-grad-op", "SHARD_GRAD_OP"),
        (fsdp(sharding_strategy="NO_SHARD"), "fsdp1-no-shard", "NO_SHARD"),
        (fsdp(version="2", auto_wrap_policy="SIZE_BASED_WRAP"), "fsdp2", "size of units is drawn"),
        (
            fsdp(version=2, sharding_strategy="SHARD_GRAD_OP"),
            "fsdp2",
            "does not read fsdp_sharding_strategy with FSDP2; fsdp_reshard_after_forward is what",
        ),
        (
            fsdp(version=1, reshard_after_forward="SHARD_GRAD_OP"),
            "fsdp1",
            "does not read fsdp_reshard_after_forward with FSDP1; fsdp_sharding_strategy is what",
        ),
        (fsdp(version=2, backward_prefetch="BACKWARD_PRE"), "fsdp2", "fsdp_backward_prefetch with"),
        (
            fsdp(version=2, min_num_params=100, auto_wrap_policy="NO_WRAP"),
            "fsdp2",
            "accelerate does not read fsdp_min_num_params with NO_WRAP",
        ),
        (fsdp(version=1), "fsdp1", "fsdp_sync_module_states, fsdp_cpu_ram_efficient_loading"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
            "deepspeed3",
            "runs as stage 3 of DeepSpeed",
        ),
    ],
)
def test_what_runs_and_what_is_said(given: Any, config: object, code: str, words: str) -> None:
    made = given(config)
    assert made.code == code
    assert words in "\n".join(made.notes)


def test_units_and_the_form_of_checkpoints(given: Any) -> None:
    assert given(fsdp(version=2)).fsdp.policy == "no_wrap"
    assert given(fsdp(version=2)).fixed["sharding"]["wrap"] == "whole"
    assert given(fsdp(version=1)).fsdp.full and not given(fsdp(version=2)).fsdp.full
    assert given(fsdp(version=1, use_orig_params="false")).fsdp.flat
    assert not given(fsdp(version=2, use_orig_params=False)).fsdp.flat
    assert not given(fsdp(version=2, cpu_ram_efficient_loading=False)).fsdp.from_rank_0


def test_of_deepspeed(given: Any, tmp_path: Path) -> None:
    inline = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "deepspeed_config": {
            "zero_stage": 2,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.5,
            "offload_optimizer_device": "none",
        },
    }
    case = merged(Case(), given(inline).fixed, source="it")
    assert (case.training.clip, case.training.microbatches) == (0.5, 3)
    assert case.precision.compute == "bf16"
    apart = tmp_path / "ds.json"
    apart.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    inline["deepspeed_config"] = {"deepspeed_config_file": str(apart)}
    assert given(inline).code == "deepspeed1"
    assert not given(inline).deepspeed.own_kernel
    inline["deepspeed_config"] = {"zero_stage": 3, "offload_optimizer_device": "cpu", "wandb": 1}
    offloaded = given(inline)
    assert offloaded.deepspeed.own_kernel and offloaded.deepspeed.maps_optimizer
    assert "deepspeed_config.wandb: accelerate ignores an unknown key" in offloaded.notes[-1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("a: [1", "is not YAML: expected ',' or ']'.* at line 1, column 6"),
        ("distributed_type: FSDP\ndistributed_type: NO\n", "has the key 'distributed_type' twice"),
        ("- 1\n", "is no accelerate config: it holds \\[1\\], not an object"),
        ("", "is no accelerate config: it holds null"),
        ({"fsdp_config": {}}, "a config of accelerate has a distributed_type"),
        ({"distributed_type": "FSDPX"}, "FSDPX.*did you mean 'FSDP'.*allowed: .*\"FSDP\""),
        ({"distributed_type": "MEGATRON_LM"}, "which zerocheck does not check: it is out of scope"),
        ({"distributed_type": "NO", "num_proceses": 2}, "no key 'num_proceses'; did you mean 'num"),
        ({"distributed_type": "NO", "mixed_precision": "fp16"}, "the CPU has no fp16 \\(allowed"),
        ("distributed_type: NO\non: 2\n", "accelerate has no key 'True'"),
        ("distributed_type: 2026-11-25\n", 'distributed_type is "2026-11-25"; allowed'),
        ("distributed_type: !!python/object:os.system x\n", "is not YAML: .* at line 1"),
        ("a: &a [*a]\n", "cannot be read as YAML: RecursionError"),
        (LAUGHS, "expands to more than 100,000 values"),
        ({"distributed_type": "NO", "mixed_precision": 3}, "mixed_precision is 3; allowed"),
        (
            {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_version": 2}},
            "does not read fsdp_config where distributed_type is MULTI_GPU \\(allowed: FSDP",
        ),
        (
            {"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            'dynamo_config.dynamo_backend is "INDUCTOR", which zerocheck does not check',
        ),
        (
            {"distributed_type": "NO", "parallelism_config": {"parallelism_config_tp_size": 2}},
            "parallelism_config is .*, which zerocheck does not check",
        ),
        (
            {"distributed_type": "NO", "compute_environment": "AMAZON_SAGEMAKER"},
            "SageMaker is out of scope",
        ),
        (
            fsdp(version=2, reshard_after_foward=False),
            "no key 'fsdp_config.fsdp_reshard_after_foward'; did you mean .*ignore it without",
        ),
        (fsdp(version=3), "fsdp_version is 3; allowed: 1, 2"),
        (fsdp(sharding_strategy="HYBRID_SHARD"), "its groups are those of nodes"),
        (fsdp(sharding_strategy="FUL_SHARD"), "allowed: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"),
        (fsdp(version=2, reshard_after_forward="FULL_SHARD"), "allowed: true or false"),
        (fsdp(state_dict_type="LOCAL_STATE_DICT"), "no other number of ranks can load"),
        (fsdp(auto_wrap_policy="TRANSFORMER_WRAP"), "did you mean 'TRANSFORMER_BASED_WRAP'"),
        (fsdp(version=2, activation_checkpointing_offload=True), "it takes an accelerator"),
        (fsdp(min_num_params="many"), 'fsdp_min_num_params is "many"; allowed: a whole number'),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"version": 2, "fsdp_version": 1}},
            "fsdp_config has 'version' and 'fsdp_version'; give one",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stag": 2}},
            "no key 'deepspeed_config.zero_stag'; did you mean 'zero_stage'",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 5}},
            "zero_optimization.stage is 5",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(given: Any, config: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        given(config)


def test_a_config_is_known_by_its_keys() -> None:
    assert recognises({"distributed_type": "FSDP"}) and recognises({"deepspeed_config": {}})
    assert not recognises({"zero_optimization": {"stage": 2}})


def test_the_code_of_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "it.yaml"
    path.write_text("distributed_type: FSDPX\n")
    assert code_of(str(path)) is None and code_of(str(tmp_path / "missing.yaml")) is None
