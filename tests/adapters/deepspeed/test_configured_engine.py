"""Configs of the user's own in real runs: they hold, and what is wrong with them is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slices import sliced

from zerocheck.adapters.deepspeed.user_config import read
from zerocheck.adapters.deepspeed.user_config.batch import BATCH, impossible_batch
from zerocheck.adapters.shared.user_config.section import Section
from zerocheck.case.codec import merged
from zerocheck.case.schema import Block, Case, Group, Model, Optimizer, Start, Training
from zerocheck.catalogue import family
from zerocheck.contract import loading
from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import EQUIVALENCE
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial
from zerocheck.run.known_issues.entries import matching, ours
from zerocheck.run.records.records import Outcome

from ..holding import holds
from .deepspeed_cases import chosen, needs_deepspeed

Write = Callable[[dict[str, Any]], str]
"""From a config to the name of its file."""

BF16 = {"bf16": {"enabled": True}}
WIDE = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
ADAM = {
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1},
    }
}
CPU = {"device": "cpu", "pin_memory": True}

HOLD: dict[str, tuple[str, int, dict[str, Any]]] = {
    "0, prescaled": ("microbatches", 3, {"prescale_gradients": True, **ADAM}),
    "0, divided before the sum": ("groups", 3, {"gradient_predivide_factor": 2}),
    "1, summed in fp32": (
        "microbatches",
        2,
        {
            "bf16": {"enabled": True, "immediate_grad_update": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": 1},
            "gradient_accumulation_steps": 2,
        },
    ),
    "2, as people write it": (
        "groups",
        3,
        {
            **WIDE,
            **ADAM,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": 5e8,
            },
        },
    ),
    "2, aligned and summed": (
        "groups",
        3,
        {
            "gradient_allreduce_op": "sum",
            "gradient_clipping": 0,
            "zero_optimization": {
                "stage": 2,
                "parameter_alignment": True,
                "use_multi_rank_bucket_allreduce": False,
                "compute_grad_norm": False,
            },
        },
    ),
    "3, offloaded in groups": (
        "microbatches",
        3,
        {
            **ADAM,
            "gradient_clipping": 0.02,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "sub_group_size": 40,
                "stage3_max_reuse_distance": 10,
            },
        },
    ),
    "3, parameters alone": (
        "groups",
        2,
        {"zero_optimization": {"stage": 3, "offload_param": CPU, "sub_group_size": 1e9}},
    ),
}
"""Name -> a case by name, its ranks, and the config."""

SLICE = ("0, prescaled", "1, summed in fp32", "2, as people write it", "3, offloaded in groups")


@pytest.fixture
def config(tmp_path: Path) -> Write:
    """A function from a config to the name of its file; it gets a batch size, to start."""

    def write(given: dict[str, Any]) -> str:
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, **given}))
        return str(path)

    return write


def judged(pool: Pool, name: str, case: Case) -> Outcome:
    """The case, with what the config fixes. name: possibly with an injected fault."""
    case = merged(case, read(family(name)[-2]).fixed, source="it")
    return Trial(pool, name, case, obligations=EQUIVALENCE).outcome()


@pytest.mark.every(4)
@needs_deepspeed
@pytest.mark.parametrize("which", sliced(tuple(HOLD), SLICE))
def test_a_right_config_holds(pool: Pool, config: Write, which: str) -> None:
    case, ranks, given = HOLD[which]
    name = config(given)
    holds(pool, name, merged(chosen(case, ranks), read(name).fixed, source="it"))


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}
NO_SIZE = {"train_micro_batch_size_per_gpu": None}

# A config with which DeepSpeed does not start: what it says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no batch size": (NO_SIZE, "Either train_batch_size or train_micro_batch_size_per_gpu needs"),
    "accumulation alone": (
        {**NO_SIZE, "gradient_accumulation_steps": 4},
        "Either train_batch_size or train_micro_batch_size_per_gpu needs",
    ),
    "another product": (
        {"train_batch_size": 13, "gradient_accumulation_steps": 2},
        "Check batch related parameters. train_batch_size is not equal to",
    ),
    "offload with a client's AdamW": (OFFLOADED, "ZeRO-Offload with a client provided optimizer"),
    "a value that its tables refuse": (
        {"zero_optimization": {"stage": 3, "sub_group_size": -1}},
        "DeepSpeedZeroConfig refuses sub_group_size: Input should be greater than or equal to 0",
    ),
    "a value of another type": (
        {"zero_optimization": {"stage": 2, "ignore_unused_parameters": "perhaps"}},
        "DeepSpeedZeroConfig refuses ignore_unused_parameters: Input should be a valid boolean",
    ),
}

STARTS: dict[str, dict[str, Any]] = {
    "whole batch": {**NO_SIZE, "train_batch_size": 64},
    "auto": {"train_micro_batch_size_per_gpu": "auto"},
    "offload, and said so": {**OFFLOADED, "zero_force_ds_cpu_optimizer": False},
    "offload with its AdamW": {**OFFLOADED, **ADAM},
    "offload that accelerate hands on": {**OFFLOADED, "gradient_accumulation_steps": "auto"},
    "keys of another program": {"monitor_config": {"wandb": {"enabled": True}}},
}


@needs_deepspeed
@pytest.mark.parametrize("which", REFUSED)
def test_with_what_deepspeed_does_not_start(pool: Pool, config: Write, which: str) -> None:
    """The verdict is in DeepSpeed's words."""
    given, words = REFUSED[which]
    outcome = judged(pool, config(given), chosen("groups", 2))
    assert outcome.status == "crashed"
    assert words in outcome.reason


@pytest.mark.every(4)
@needs_deepspeed
@pytest.mark.parametrize("which", STARTS)
def test_with_what_deepspeed_starts(pool: Pool, config: Write, which: str) -> None:
    name = config(STARTS[which])
    holds(pool, name, merged(chosen("groups", 2), read(name).fixed, source="it"))


@needs_deepspeed
def test_accelerate_offloads_another_optimizer_as_adam(pool: Pool, config: Write) -> None:
    """`map_pytorch_optim_to_deepspeed` makes DeepSpeedCPUAdam of SGD without a word."""
    handed_on = {**OFFLOADED, "train_micro_batch_size_per_gpu": "auto"}
    case = merged(chosen("groups", 2), {"optimizer": {"kind": "sgd"}}, source="it")
    outcome = judged(pool, config(handed_on), case)
    assert outcome.status == "unsupported"
    assert "accelerate puts DeepSpeedCPUAdam in place of" in outcome.reason


@needs_deepspeed
@given(
    whole=st.none() | st.integers(0, 40),
    micro=st.none() | st.integers(0, 8),
    count=st.none() | st.integers(1, 6),
)
def test_sizes_of_batches_are_those_of_deepspeed(
    whole: int | None, micro: int | None, count: int | None
) -> None:
    """DeepSpeed itself derives and asserts them, for every number of ranks up to 40."""
    from deepspeed.runtime.config import DeepSpeedConfig as Original

    starts = False
    for size in range(1, 41):
        one: Any = object.__new__(Original)
        one.train_batch_size, one.train_micro_batch_size_per_gpu = whole, micro
        one.gradient_accumulation_steps, one.world_size = count, size
        with suppress(AssertionError, ZeroDivisionError):
            one._configure_train_batch_size()
            starts = True
    sizes = dict(zip(BATCH, (whole, micro, count), strict=True))
    impossible = impossible_batch(
        Section("DeepSpeed", "it", "", {k: v for k, v in sizes.items() if v is not None})
    )
    assert impossible == ({} if starts else sizes)


@needs_deepspeed
def test_an_injected_fault_is_caught_and_named(pool: Pool, config: Write) -> None:
    name = config({"zero_optimization": {"stage": 2}, "gradient_clipping": 0, **ADAM})
    outcome = judged(pool, f"{name}+rank-left-out", chosen("groups", 3))
    assert outcome.judgement is not None
    named = {violation.obligation: violation.causes for violation in outcome.judgement.violations}
    assert named["gradient"] == ("ranks left out",)


@needs_deepspeed
def test_listed_faults_of_its_stage_are_known(pool: Pool, config: Write) -> None:
    """In bf16 stage 0 takes a step when it is made."""
    name = config({**BF16, **ADAM})
    case = merged(Case(mesh=(1,)), read(name).fixed, source="it")
    outcome = Trial(pool, name, case, obligations=EQUIVALENCE).outcome()
    assert outcome.status == "violated" and outcome.judgement is not None
    finished = outcome.record(0, name, case)
    for violation in outcome.judgement.violations:
        known = matching(ours(), finished, violation)
        assert [issue.implementation for issue in known] == ["deepspeed0"]


def _engine_config(name: str, case: Case) -> dict[str, Any]:
    kind = loading.load(name)
    one: Any = object.__new__(kind)
    one.case = merged(case, read(name).fixed, source="it")
    found: dict[str, Any] = one._config()
    return found


@needs_deepspeed
def test_what_the_engine_is_given(config: Write) -> None:
    name = config(
        {
            **WIDE,
            **ADAM,
            "gradient_clipping": 0.5,
            "gradient_accumulation_steps": 3,
            "checkpoint": {"tag_validation": "Fail"},
            "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": ["norm"]},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": CPU,
                "stage3_allgather_sequential": True,
                "reduce_bucket_size": 64,
            },
        }
    )
    made = _engine_config(name, Case())
    assert made["gradient_clipping"] == 0.5 and made["gradient_accumulation_steps"] == 3
    assert made["checkpoint"] == {"load_universal": False, "tag_validation": "Fail"}
    assert made["communication_data_type"] == "bf16" and made["bf16"] == {"enabled": True}
    assert made["data_types"] == {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": ["norm"]}
    assert made["optimizer"]["params"] == {**ADAM["optimizer"]["params"], "torch_adam": True}  # type: ignore[dict-item]
    zero = made["zero_optimization"]
    assert zero["stage"] == 3 and zero["allgather_sequential"] and zero["reduce_bucket_size"] == 64
    assert "offload_optimizer" in zero and "offload_param" not in zero and zero["overlap_comm"]
    plain = _engine_config(config({"gradient_allreduce_op": "sum"}), Case())
    assert plain["gradient_allreduce_op"] == "sum" and "optimizer" not in plain


@needs_deepspeed
def test_a_case_that_says_something_else_is_refused(config: Write) -> None:
    name = config({"gradient_predivide_factor": 2, "gradient_clipping": 0.5})
    kind = loading.load(name)
    case = merged(Case(), read(name).fixed, source="it")
    assert kind.supports(case) is None
    other = msgspec.structs.replace(case, training=Training(clip=1.0))
    assert "fixes training.clip as 0.5" in str(kind.supports(other))
    alone = msgspec.structs.replace(case, mesh=(1,))
    assert "larger than the number of ranks, 1" in str(kind.supports(alone))
    options = {"ignore_unused_parameters": False, "offload_optimizer": CPU, "stage": 2}
    name = config({"zero_optimization": options})
    idle = merged(Case(model=Model(unused=True)), read(name).fixed, source="it")
    assert "stops at a parameter that is not used, spare." in str(loading.load(name).supports(idle))
    name = config(ADAM)
    groups = (Group(pattern="*.bias"), Group())
    several = merged(Case(optimizer=Optimizer(groups=groups)), {}, source="it")
    assert "fixes" in str(loading.load(name).supports(several))


@needs_deepspeed
def test_its_class(config: Write) -> None:
    name = config({"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0})
    kind = loading.load(name)
    assert kind is loading.load(name) and issubclass(kind, loading.load("deepspeed1"))
    assert kind.without.keys() == {"clip"} and kind.fixed["training"]["clip"] is None
    model = Model(blocks=(Block(kind="mlp"),))
    case = merged(Case(model=model, start=Start()), kind.fixed, source="it")
    network = loading.load("deepspeed1")
    from zerocheck.adapters.shared.units import skeleton

    bytes_of = kind.layout(skeleton(case), case, 0)
    assert bytes_of is not None and bytes_of == network.layout(skeleton(case), case, 0)
    name = config({"zero_optimization": {"stage": 1, "parameter_alignment": True}})
    other = loading.load(name)
    assert other is not kind and other.layout(skeleton(case), case, 0) is None


def test_without_the_library_it_says_how_to_install_it(
    config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerocheck.catalogue.find_spec", lambda _: None)
    with pytest.raises(
        UsageError, match=r"ds_config.json needs .* 'zerocheck-sharding\[deepspeed\]'"
    ):
        loading.load(config({}))
