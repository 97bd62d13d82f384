"""The Trainer of torchtitan on CPU ranks, checked by zerocheck.integrations.torchtitan.

torchrun --nproc-per-node 2 titan_trainer.py --accumulation 2

It wants an accelerator. So the device is said to be the CPU before torchtitan is imported, and what
asks a device for its memory, and for timeouts of NCCL, is left out. Its model, parallelization,
optimizer and `train_step` are torchtitan's. Tokens are random, and no tokenizer is needed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from trainer_faults import Planted, asked, checks, line

from zerocheck.integrations.torchtitan import check

with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
    titan: Any = import_module("torchtitan.trainer")
metrics: Any = import_module("torchtitan.components.metrics")
CrossEntropyLoss: Any = import_module("torchtitan.components.loss").CrossEntropyLoss
attention: Any = import_module("torchtitan.models.common.attention")
qwen3_moe_debug: Any = import_module("torchtitan.models.qwen3.config_registry").qwen3_moe_debug
llama3_debugmodel: Any = import_module("torchtitan.models.llama3.config_registry").llama3_debugmodel

WORDS, LENGTH = 2048, 8


class NoMonitor:
    """A CPU has no memory of a device."""

    device_name = "CPU"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Nothing is counted."""


class Ready:
    """A component that is its own configuration."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.build = make


class RandomTokens:
    """Batches without end; ranks have other numbers of tokens that count."""

    def __init__(self, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self._rank, self._size = dp_rank, local_batch_size

    def __iter__(self) -> Iterator[Any]:
        data = torch.Generator().manual_seed(self._rank)
        while True:
            tokens = torch.randint(WORDS, (self._size, LENGTH + 1), generator=data)
            labels = tokens[:, 1:].clone()
            labels[0, : 2 + self._rank] = -100
            yield {"input": tokens[:, :-1]}, labels


def config_of(given: argparse.Namespace) -> Any:
    steps, accumulation = given.steps, given.accumulation
    config = qwen3_moe_debug() if given.moe else llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[: 2 if given.pp > 1 else 1]
    for block in model.layers:  # flex and varlen attention need a GPU
        block.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=config.loss.loss_fn.global_vocab_size)
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = 2, LENGTH, steps
    training.global_batch_size = 2 * accumulation * dist.get_world_size() // (given.pp * given.tp)
    training.disable_cuda_graphs = True
    training.mixed_precision_param = training.mixed_precision_reduce = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.pipeline_parallel_degree = given.pp
    config.parallelism.tensor_parallel_degree = given.tp
    config.parallelism.expert_parallel_degree = given.ep
    config.activation_checkpoint = None
    config.validator.enable = False
    config.checkpoint.enable, config.checkpoint.interval = given.saves is not None, 2
    if given.fault == "optimizer not loaded":
        config.checkpoint.exclude_from_loading = ["optimizer"]
    config.dump_folder = given.saves or tempfile.mkdtemp()
    config.tokenizer, config.dataloader = Ready(lambda **_: None), Ready(RandomTokens)
    return config


def trainer_of(given: argparse.Namespace) -> Any:
    config = config_of(given)
    with (
        mock.patch.object(metrics, "build_device_memory_monitor", NoMonitor),
        mock.patch.object(type(config), "to_dict", return_value={}),
        mock.patch.object(type(config), "maybe_log"),
        mock.patch.object(titan.Trainer, "init_distributed", already),
    ):
        trainer = titan.Trainer(config)
    layers = [layer for part in trainer.model_parts for layer in part.layers.values()]
    for module in [one for part in trainer.model_parts for one in part.modules()]:
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            if given.fault == "a layer divided by ep" and module in layers:
                module.set_gradient_divide_factor(float(given.ep))
    if given.pp > 1:
        in_microbatches(trainer.pp_schedule)
    return trainer


def in_microbatches(schedule: Any) -> None:
    """Let a schedule of torch 2.13 take microbatches, as torchtitan 0.3.0 passes them."""

    def step(*, losses: Any, return_outputs: bool, loss_kwargs: Any, **given: Any) -> None:
        for stage in [*getattr(schedule, "_stages", ())] or [schedule._stage]:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        names = ("arg_mbs", "kwarg_mbs", "target_mbs")
        mine = (given[name] for name in names)
        schedule._step_microbatches(*mine, losses, return_outputs, loss_kwargs=loss_kwargs)

    schedule.step = step


begin = titan.Trainer.init_distributed


def already(trainer: Any) -> Any:
    """Begin without a second process group."""
    with mock.patch.object(
        titan.dist_utils, "init_distributed", return_value=dist.get_world_size()
    ):
        return begin(trainer)


def make_model() -> nn.Module:
    config = config_of(asked())
    config.model_spec.model.update_from_config(config=config)
    model = config.model_spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model  # type: ignore[no-any-return]


@contextmanager
def unreduced() -> Iterator[None]:
    """Give each rank its own part of what is reduced."""

    def own(output: Any = None, given: Any = None, **named: Any) -> None:
        output = named.get("output", output)
        given = named.get("input", given)
        output.copy_(given.chunk(dist.get_world_size())[dist.get_rank()])

    names = ("reduce_scatter_tensor", "reduce_scatter_single")
    known = [name for name in names if hasattr(dist, name)]
    with mock.patch.multiple(dist, **dict.fromkeys(known, own)):
        yield


def plant(planted: Planted, trainer: Any) -> None:
    """Give each forward and backward the fault of the step that is being taken."""
    plain = trainer.fwd_bwd_fn

    def faulty(*given: Any) -> Any:
        if planted.now == "not reduced":
            with unreduced():
                result = plain(*given)
        else:
            result = plain(*given)
        planted.change(trainer.model_parts[0])
        planted.count()
        return result

    trainer.fwd_bwd_fn = faulty


if __name__ == "__main__":
    given = asked()
    dist.init_process_group("gloo")
    trainer = trainer_of(given)
    plant(Planted(given), trainer)
    found = None
    if not given.unchecked:
        reference = None if given.no_reference else make_model
        found = check(trainer, reference=reference, **checks(given))
    started = time.perf_counter()
    with mock.patch.object(titan.dist_utils, "set_pg_timeouts"):
        trainer.train()
    if dist.get_rank() == 0:
        print(f"SECONDS {time.perf_counter() - started:.3f}")
        print(line(None if found is None else found.attached), flush=True)
    dist.destroy_process_group()
