"""What becomes of a DeepSpeed config, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerocheck.adapters.deepspeed.options import named, options_of
from zerocheck.adapters.deepspeed.user_config import DeepSpeedConfig, code_of, read
from zerocheck.case.codec import merged
from zerocheck.case.schema import Case
from zerocheck.errors import UsageError

ADAM = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "weight_decay": 3e-7}}
AUTO = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}


@pytest.fixture
def given(tmp_path: Path) -> Any:
    """A function from a config to what is made of it."""

    def make(config: object) -> DeepSpeedConfig:
        path = tmp_path / "ds_config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return read(str(path))

    return make


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def test_a_config_of_stage_2_as_people_write_it(given: Any) -> None:
    made = given(
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
            "bf16": {"enabled": True},
            "optimizer": ADAM,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            **zero(
                2,
                overlap_comm=True,
                contiguous_gradients=False,
                reduce_bucket_size=5e8,
                allgather_bucket_size=2e8,
            ),
        }
    )
    assert made.stage == 2 and made.adam is not None and not made.optimizer
    case = merged(Case(), made.fixed, source="it")
    assert (case.training.clip, case.training.microbatches) == (0.5, 4)
    assert (case.precision.compute, case.precision.reduce, made.accumulate_dtype) == (
        "bf16",
        "bf16",
        None,
    )
    (group,) = case.optimizer.groups
    assert (group.pattern, group.lr, group.beta1, group.beta2) == ("*", 3e-5, 0.8, 0.999)
    assert (group.eps, group.weight_decay) == (1e-8, 3e-7)
    options = options_of(case)
    assert options.overlap_comm and options.reduce_scatter and options.own_optimizer
    assert not options.contiguous_gradients and not options.round_robin_gradients
    assert "bucket" not in made.fixed["sharding"] and not made.zero and not made.top
    message = "\n".join(made.notes)
    assert "runs as stage 2 of DeepSpeed\n" in message
    assert "scheduler: each case sets the learning rate of each step itself" in message
    assert "train_batch_size, train_micro_batch_size_per_gpu: cases draw the ranks" in message
    assert "drawn: zero_optimization.reduce_bucket_size, zero_optimization.allgather_bu" in message
    assert list(made.without) == ["buffers"]


def test_what_is_not_said_is_deepspeeds_default(given: Any) -> None:
    made = given(zero(3))
    assert made.fixed == {
        "training": {"norm": "2", "clip": 1.0, "microbatches": 1},
        "precision": {"compute": "fp32", "reduce": "fp32"},
        "sharding": {"offload": "none"},
        "options": {
            "deepspeed.contiguous_gradients": True,
            "deepspeed.reduce_scatter": True,
            "deepspeed.overlap_comm": True,
            "deepspeed.own_optimizer": False,
            "deepspeed.universal": False,
        },
    }
    assert "stage 3 of DeepSpeed, and clips at 1.0, DeepSpeed's default" in made.notes[0]
    assert given({}).stage == 0 and given({"zero_optimization": True}).stage == 1
    assert given(zero(2)).fixed["options"]["deepspeed.overlap_comm"] is False
    assert given({**zero(2), "gradient_clipping": 0}).without.keys() == {"clip"}
    # DeepSpeed's kernels decay nothing by default, torch's AdamW does.
    without = {"type": "Adam", "params": {"lr": 0.1}}
    of_torch = {"type": "AdamW", "params": {"torch_adam": True}}
    for optimizer, decay in ((without, 0.0), (of_torch, 0.01)):
        (group,) = given({"optimizer": optimizer}).fixed["optimizer"]["groups"]
        assert group["weight_decay"] == decay


def test_auto_is_open(given: Any) -> None:
    open_keys = dict.fromkeys(
        ("gradient_clipping", "gradient_accumulation_steps", "train_batch_size"), "auto"
    )
    enabled = {"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}}
    options = {"overlap_comm": "auto", "reduce_bucket_size": "auto", "sub_group_size": "auto"}
    made = given({**open_keys, **enabled, "optimizer": AUTO, **zero(3, **options)})
    assert made.fixed["training"] == {"norm": "2"} and "precision" not in made.fixed
    assert made.fixed["optimizer"] == {"kind": "adamw", "amsgrad": False, "maximize": False}
    assert "deepspeed.overlap_comm" not in made.fixed["options"] and not made.zero
    assert made.adam.config["params"] == {"torch_adam": True} and not made.adam.named
    derived = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}
    assert "microbatches" not in given(derived).fixed["training"]


def test_small_sizes_are_taken_and_large_ones_drawn(given: Any) -> None:
    made = given(
        zero(
            3,
            reduce_bucket_size=4096,
            prefetch_bucket_size=0,
            stage3_param_persistence_threshold=4097,
            stage3_max_live_parameters=1e9,
            stage3_max_reuse_distance=10,
            stage3_model_persistence_threshold=1e5,
        )
    )
    options = made.fixed["options"]
    assert made.fixed["sharding"]["bucket"] == 4096 and options["deepspeed.prefetch_bucket"] == 0
    large = ("persistence_threshold", "max_live_parameters")
    assert not {*named(*large)} & options.keys()
    assert made.zero == {"max_reuse_distance": 10, "model_persistence_threshold": 1e5}
    assert "drawn: zero_optimization.stage3_param_persistence_threshold, zero" in made.notes[1]
    many = given({"gradient_accumulation_steps": 128})
    assert "microbatches" not in many.fixed["training"] and "drawn: gradient_acc" in many.notes[1]
    stage2 = given(zero(2, prefetch_bucket_size=0))
    assert not {*named("prefetch_bucket")} & stage2.fixed["options"].keys()


def test_offloading(given: Any) -> None:
    both = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    made = given(zero(3, **both, offload_param={"device": "none"}))
    assert (made.optimizer, made.param) == (True, False)
    assert made.fixed["sharding"]["offload"] == "pageable"
    old = given(zero(2, cpu_offload=True))
    assert old.optimizer and old.fixed["sharding"]["offload"] == "pageable"
    useless = given(zero(2, offload_param={"device": "cpu"}))
    assert not useless.param and "stage 2 keeps parameters whole" in "\n".join(useless.notes)
    none = given(zero(0, **both)).fixed
    assert not none["sharding"] and none["options"] == {"deepspeed.own_optimizer": False}


def test_accelerate_puts_the_kernel_of_deepspeed_in_place_of_adamw(given: Any) -> None:
    """Only HuggingFace's integration fills in "auto", so that accelerate hands the config on."""
    offloaded = zero(3, offload_optimizer={"device": "cpu"})
    alone, handed_on = given(offloaded), given({**offloaded, "train_batch_size": "auto"})
    assert alone.own_kernel and not alone.maps_optimizer
    assert handed_on.own_kernel and handed_on.maps_optimizer
    assert "DeepSpeedCPUAdam is what it asks for" in alone.notes[-1]
    assert "not checked: DeepSpeedCPUAdam, which accelerate puts in" in handed_on.notes[-1]
    assert not given({"optimizer": ADAM, **offloaded, "train_batch_size": "auto"}).notes[2:]


def test_a_key_that_deepspeed_ignores_is_left_out_and_said(given: Any) -> None:
    """A config with keys of another program trains all the same."""
    monitors = {"enabled": True, "wandb": {"enabled": True}}
    logger = {"comms_logger": {"enabled": True}}
    made = given({"comms_config": logger, "monitor_config": monitors, "checkpoint": {"mine": 1}})
    message = "\n".join(made.notes)
    assert "left out: comms_config, monitor_config, checkpoint.mine: DeepSpeed ignores" in message
    assert not made.top and not made.checkpoint


def test_dtypes(given: Any) -> None:
    bf16 = {"bf16": {"enabled": True, "immediate_grad_update": True}}
    wide = {"data_types": {"grad_accum_dtype": "float32", "param_dtype": "bf16"}}
    made = given({**bf16, **wide, **zero(1)})
    assert made.fixed["precision"] == {"compute": "bf16", "reduce": "bf16"}
    assert made.accumulate_dtype == "fp32" and made.bf16 == {"immediate_grad_update": True}
    both = given({**bf16, **wide, "communication_data_type": "FP32", **zero(1)})
    assert both.fixed["precision"] == {"compute": "bf16", "reduce": "fp32"}
    assert both.accumulate_dtype is None
    narrow = given({"communication_data_type": "bf16", **zero(1)})
    assert narrow.fixed["precision"] == {"compute": "fp32", "reduce": "bf16"}
    left_open = given({"bfloat16": {"enabled": "auto"}, "communication_data_type": "fp32"})
    assert left_open.fixed["precision"] == {"reduce": "fp32"}


def test_what_the_engine_is_given_as_it_stands(given: Any) -> None:
    made = given(
        {
            "prescale_gradients": True,
            "gradient_allreduce_op": "SUM",
            "gradient_predivide_factor": 4,
            "checkpoint": {"tag_validation": "Fail", "load_universal": True},
            "hybrid_engine": {"enabled": False},
            "tensor_parallel": {"autotp_size": 1},
            "_comment": "of its author",
            **zero(2, sub_group_size=1e9, reduce_scatter=False, zero_quantized_weights=False),
        }
    )
    assert made.top == {"prescale_gradients": True} and made.average == "sum"
    assert made.predivide == 1.0  # without effect beside prescale_gradients
    assert made.zero == {"sub_group_size": 1e9} and made.checkpoint == {"tag_validation": "Fail"}
    assert made.fixed["options"]["deepspeed.universal"] is True
    assert given({"gradient_predivide_factor": 4}).predivide == 4.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_cliping": 1.0}, "no key 'gradient_cliping'; did you mean 'gradient_clipping'"),
        (zero(2, overlap_com=True), "'zero_optimization.overlap_com'; did you mean 'overlap_comm'"),
        ({"bf16": {"enable": True}}, "'bf16.enable'; did you mean 'enabled'"),
        (
            {"optimizer": {"type": "AdamW", "params": {"beta": 1}}},
            "'optimizer.params.beta'; did you mean 'betas'",
        ),
        ({"checkpoint": {"load_universl": True}}, "did you mean 'load_universal'"),
        (zero(2, offload_optimizer={"devise": "cpu"}), "did you mean 'device'"),
        (zero(4), "zero_optimization.stage is 4; allowed: 0, 1, 2, 3"),
        (zero("auto"), 'zero_optimization.stage is "auto"'),  # type: ignore[arg-type]
        (zero(2, overlap_comm="yes"), 'overlap_comm is "yes"; allowed: true or false'),
        (zero(2, reduce_bucket_size=0), "reduce_bucket_size is 0; allowed: a whole number >= 1"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1; allowed: a number >= 0"),
        ({"gradient_accumulation_steps": 1.5}, "is 1.5; allowed: a whole number >= 1"),
        ({"zero_optimization": 2}, "zero_optimization is 2; allowed: an object"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, which zerocheck does not check"),
        ({"communication_data_type": "fp16"}, 'allowed: "fp32", "bf16"'),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "fp32", **zero(1)},
            'data_types.grad_accum_dtype "fp32" beside it',
        ),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "parameters are in fp32"),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            "refuses this mix without ZeRO",
        ),
        ({"data_types": {"param_dtype": "bf16"}}, '"fp32", as bf16.enabled says'),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "moments are then in bf16"),
        ({"optimizer": {"type": "OneBitAdam"}}, r'type is "OneBitAdam", which .*"Adam", "AdamW"'),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
            "allowed: gradient_clipping, beside `optimizer`",
        ),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "betas is .* two numbers"),
        (zero(3, offload_param={"device": "nvme"}), 'allowed: "none", "cpu"'),
        (zero(3, offload_optimizer={"device": "cpu", "ratio": 0.3}), "ratio is 0.3, which"),
        (zero(3, zero_quantized_weights=True), r"quantized.*\(allowed: false, left out\)"),
        (zero(3, zero_hpz_partition_size=8), r"hpZ.*\(allowed: 0, 1, left out\)"),
        (zero(3, mics_shard_size=8), "DeepSpeed 0.19.8 removed it"),
        ({"sparse_gradients": False}, "DeepSpeed 0.19.8 removed it.*; leave it out"),
        ({"pipeline": {"stages": 2}}, "pipeline parallelism is out of scope"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size is 2, which"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is true, which"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is true, which"),
        ({"prescale_gradients": True, **zero(2)}, "with zero_optimization.reduce_scatter"),
        ({"gradient_predivide_factor": 3.0}, "allowed: powers of two"),
        ({"gradient_allreduce_op": "sum", **zero(3)}, "refuses it at stage 3"),
        (zero(2, compute_grad_norm=False), "where gradient_clipping is 0"),
        (
            zero(3, prefetch_bucket_size=1, stage3_prefetch_bucket_size=2),
            "prefetch_bucket_size is zero_optimization.stage3_prefetch_bucket_size too",
        ),
        ({"case": {}, "implementation": "fsdp2"}, "is a case file.*zerocheck replay"),
        ([], "it holds \\[\\], not an object"),
        ('{"train_batch_size": 16,\n "gradient_clipping" 1.0}', "at line 2, column 22"),
        ('{"train_batch_size": 16', "is not JSON: .* line 1, column 24"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "key 'stage' twice"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    given: Any, config: object, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        given(config)
    assert "ds_config.json" in str(caught.value)


def test_comments_are_read_as_deepspeed_reads_them(given: Any) -> None:
    pytest.importorskip("hjson")
    made = given('{ // a note\n "zero_optimization": {"stage": 2,},\n # another\n}')
    assert made.stage == 2
    with pytest.raises(UsageError, match="line 1, column 27"):  # Hjson takes it for a string
        given('{"gradient_accumulation": two\n}')


def test_files(tmp_path: Path) -> None:
    (tmp_path / "ds_config_zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(
        UsageError, match=r"there is no file .*did you mean '.*ds_config_zero2.json'"
    ):
        read(str(tmp_path / "ds_config_zero3.json"))
    (tmp_path / "large.json").write_text(" " * (1 << 20) + "{}")
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read(str(tmp_path / "large.json"))
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(UsageError, match="is not UTF-8"):
        read(str(tmp_path / "latin.json"))
    assert code_of(str(tmp_path / "ds_config_zero2.json")) == "deepspeed2"
    assert code_of(str(tmp_path / "latin.json")) is None


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(zero(1)))
    first = read(str(path))
    assert read(str(path)) is first
    path.write_text(json.dumps(zero(3)) + " ")
    assert read(str(path)).stage == 3
