"""torch only: a full state dict of SGD without momentum cannot be loaded into a sharded model.

    python full_state_dict_of_sgd_without_momentum.py

What `get_state_dict` gave is refused by `set_state_dict`, with the same options.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# 1 is for the fault; anything else that fails ends with 2.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stdout.flush(), os._exit(2))

OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


def trained(momentum: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def loads(momentum: float) -> bool:
    parameters, states = get_state_dict(*trained(momentum), options=OPTIONS)
    try:
        set_state_dict(
            *trained(momentum),
            model_state_dict=parameters,
            optim_state_dict=states,
            options=OPTIONS,
        )
    except AssertionError as error:
        print(f"momentum {momentum}: AssertionError: {error}", flush=True)
        return False
    print(f"momentum {momentum}: loaded", flush=True)
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=10),
        )
        assert loads(0.9)
        wrong = not loads(0.0)
        dist.destroy_process_group()
    print("the fault is there" if wrong else "the fault is gone", flush=True)
    sys.exit(1 if wrong else 0)
