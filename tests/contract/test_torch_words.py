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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from zerocheck.case.schema import Block, Case, Model, Optimizer, Training
from zerocheck.contract.refusals import refused_infinity_norm, refused_while_run, torch_refusals
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


class Twice(nn.Module):
    """A layer, then another that is called twice, each time in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_ddp_refuses_reentrant_checkpoints_of_a_module_that_is_called_twice() -> None:
    """Of a case that calls each block once it is a crash, whatever the words."""
    once = Case(model=Model(blocks=(Block(kind="mlp"), Block(kind="mlp"))))
    twice = Case(model=Model(blocks=(Block(kind="mlp"),), calls=(0, 0)))
    model = DistributedDataParallel(Twice())
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(2, 2)).sum().backward()
    assert "only once" in (refused_while_run(torch.device("cpu"), raised.value, twice) or "")
    assert refused_while_run(torch.device("cpu"), raised.value, once) is None


def test_torch_refuses_the_infinity_norm_of_nothing() -> None:
    """Of a case without such a parameter it is a crash."""
    empty = nn.Parameter(torch.empty(0))
    empty.grad = torch.empty(0)
    case = Case(model=Model(blocks=(Block(kind="mlp", empty=True),)))
    with pytest.raises(Unsupported, match="torch refuses to clip"), refused_infinity_norm(case):
        nn.utils.clip_grad_norm_([empty], 1.0, float("inf"))
    with pytest.raises(RuntimeError, match="empty"), refused_infinity_norm(Case()):
        nn.utils.clip_grad_norm_([empty], 1.0, float("inf"))


def test_what_fsdp1_refuses_of_recurrent_modules_on_a_gpu() -> None:
    """cuDNN moves their weights. Seen with torch 2.11.0 on an H100."""
    error = AssertionError(
        "FSDP does not support changing the parameters between forward and backward for "
        "HandleShardingStrategy.SHARD_GRAD_OP"
    )
    recurrent = Case(model=Model(blocks=(Block(kind="recurrent"),)))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert "torch refuses it on cuda" in (refused_while_run(gpu, error, recurrent) or "")
    assert refused_while_run(cpu, error, recurrent) is None
    assert refused_while_run(gpu, error, Case()) is None


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (
            Case(training=Training(loss_scale=1024.0)),
            NotImplementedError(
                "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
            ),
        ),
        (
            Case(
                model=Model(blocks=(Block(kind="mlp", transposed=True),)),
                optimizer=Optimizer(kernel="fused"),
            ),
            RuntimeError(
                "params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout"
            ),
        ),
        (
            Case(model=Model(blocks=(Block(kind="recurrent", transposed=True),))),
            RuntimeError(
                "view size is not compatible with input tensor's size and stride (at least one "
                "dimension spans across two contiguous subspaces). Use .reshape(...) instead."
            ),
        ),
    ],
)
def test_what_kernels_refuse_on_a_gpu(case: Case, error: Exception) -> None:
    """Seen with torch 2.11.0 on an H100; no other case has an excuse for it."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert "torch refuses it on cuda" in (refused_while_run(gpu, error, case) or "")
    assert refused_while_run(cpu, error, case) is None
    assert refused_while_run(gpu, error, Case()) is None
