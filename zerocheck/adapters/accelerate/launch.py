"""accelerate in a rank process: the environment of `accelerate launch`, and state put back."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

PREFIXES = ("ACCELERATE_", "FSDP_")
"""Variables by which `accelerate launch` hands a config on."""


def environment_of(config_file: str, world_size: int) -> dict[str, str]:
    """Return the variables that `accelerate launch --config_file` sets for its processes."""
    before = dict(os.environ)
    parser = launch_command_parser()
    given = ["--config_file", config_file, "--num_processes", str(world_size), "train.py"]
    arguments = parser.parse_args(given)
    try:
        arguments, _, _ = _validate_launch_command(arguments)
        made = prepare_multi_gpu_env(arguments)
    finally:
        put_back(before)
    return {name: value for name, value in made.items() if name.startswith(PREFIXES)}


def put_back(before: Mapping[str, str]) -> None:
    """Give accelerate's variables the values that they had before."""
    for name in [one for one in os.environ if one.startswith(PREFIXES)]:
        if name not in before:
            del os.environ[name]
    for name, value in before.items():
        if name.startswith(PREFIXES):
            os.environ[name] = value


def forget() -> None:
    """Have accelerate forget the accelerator of an earlier case: its state is of the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def use_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Have an accelerator on the CPU do as on GPUs, where it does not ignore the plugin.

    What `AcceleratorState.__init__` does there. FSDP1 refuses the device "cpu:0", and a state dict
    that it offloads to the CPU is of freed memory where the model is there already.
    """
    state = accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.device = torch.device("cpu")
    PartialState._shared_state["distributed_type"] = state.distributed_type
    PartialState._shared_state["device"] = state.device
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    if plugin.fsdp_version == 1:
        for config in (plugin.state_dict_config, plugin.optim_state_dict_config):
            config.offload_to_cpu = False
    state.fsdp_plugin = plugin
