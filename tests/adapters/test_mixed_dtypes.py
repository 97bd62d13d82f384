"""Parameters of two dtypes: what torch refuses is declared, flat buffers have one dtype each."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.adapters.textbook.zero1 import Zero1
from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.adapters.textbook.zero3 import Zero3
from zerocheck.case.schema import Block, Case, Model, Sharding, WrapKind
from zerocheck.contract import Implementation, Microbatch
from zerocheck.models.batches import batch
from zerocheck.models.network import build_model

from .driver import in_ranks

TEXTBOOK: list[type[Implementation]] = [Zero1, Zero2, Zero3]
BLOCKS = (Block(kind="mlp", hidden=5), Block(kind="attention", heads=2, dtype="bf16"))
CASE = Case(mesh=(2,), model=Model(blocks=BLOCKS))


def _refused(mesh: DeviceMesh, case: Case) -> str:
    """What torch says to a forward with the whole model in one unit."""
    model = build_model(case)
    fully_shard(model, mesh=mesh)
    try:
        model(*batch(case, step=0, rank=mesh.get_rank(), microbatch=0).inputs)
    except AssertionError as error:
        return str(error)
    return ""


def test_fsdp2_declares_what_torch_refuses() -> None:
    frozen = msgspec.structs.replace(CASE.model, frozen=("blocks.1.*",))
    for model, refused in ((CASE.model, True), (frozen, False), (Model(blocks=BLOCKS[:1]), False)):
        case = msgspec.structs.replace(CASE, model=model, sharding=Sharding(wrap="whole"))
        message = in_ranks(2, _refused, case)
        assert [("uniform original parameter dtype" in text) for text in message] == [refused] * 2
        assert (Fsdp2.supports(case) is not None) == refused
    wraps: tuple[WrapKind, ...] = ("block", "layer")
    for wrap in wraps:
        assert Fsdp2.supports(msgspec.structs.replace(CASE, sharding=Sharding(wrap=wrap))) is None


def _dtypes(mesh: DeviceMesh, kind: type[Implementation], case: Case) -> list[tuple[bool, int]]:
    """Per shard on this rank: is it of its parameter's dtype, and its address modulo 64."""
    model = build_model(case)
    wanted = {name: parameter.dtype for name, parameter in model.named_parameters()}
    implementation = kind(model, case, mesh)
    drawn = batch(case, step=0, rank=mesh.get_rank(), microbatch=0)
    step = _step(case, drawn)
    implementation.train_step(step)
    found = []
    for shard in implementation.shards():
        if shard.role in ("parameter", "gradient", "exp_avg") and shard.tensor is not None:
            right = shard.tensor.dtype == wanted[shard.name]
            whole = shard.index is None and shard.tensor.numel() > 0
            found.append((right, shard.tensor.data_ptr() % 64 if whole else 0))
    implementation.close()
    return found


def _step(case: Case, drawn: object) -> object:
    from zerocheck.contract import Step
    from zerocheck.contract.groups import learning_rates
    from zerocheck.models.batches import loss_of

    microbatch = Microbatch(
        inputs=drawn.inputs,  # type: ignore[attr-defined]
        target=drawn.target,  # type: ignore[attr-defined]
        seed=drawn.seed,  # type: ignore[attr-defined]
        loss_of=loss_of(case),
        on_loss=None,
    )
    return Step(
        index=0, microbatches=[microbatch], lr=learning_rates(case, 0), reached=lambda _: None
    )


@pytest.mark.parametrize("kind", TEXTBOOK)
def test_every_shard_has_the_dtype_of_its_parameter(kind: type[Implementation]) -> None:
    for rank in in_ranks(2, _dtypes, kind, CASE):
        assert rank and all(right and not offset for right, offset in rank)
    assert torch.bfloat16 in {p.dtype for p in build_model(CASE).parameters()}
