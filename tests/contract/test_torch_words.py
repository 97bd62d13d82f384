"""What the contract recognises of torch is what the installed torch says and does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from zerocheck.contract.refusals import torch_refusals
from zerocheck.errors import Unsupported


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))


def _frozen() -> nn.Module:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    return model


def _mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("model", [Scalar, _mixed, _frozen])
def test_fsdp1_refuses(model: type[nn.Module]) -> None:
    with pytest.raises(Unsupported, match="torch refuses the model"), torch_refusals():
        FullyShardedDataParallel(model(), use_orig_params=False, device_id=torch.device("cpu"))


def test_fsdp2_refuses() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    with pytest.raises(Unsupported, match="torch refuses the model"), torch_refusals():
        fully_shard(Scalar(), mesh=mesh)
