"""Right code that runs the model by another autograd graph holds, and wrong code is still caught.

Each way changes the last bits of local gradients: checkpointing, a compiled or rewritten forward,
another order of accumulation, other strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from observing import Observed
from slices import paired
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.case.schema import Block, Case, Data, Model, Training
from zerocheck.contract import Built

CASE = Case(
    mesh=(2,),
    seed=3,
    model=Model(
        inputs=5,
        width=8,
        outputs=3,
        blocks=(
            Block(kind="mlp", residual=True),
            Block(kind="batch_norm"),
            Block(kind="attention", heads=2, residual=True),
            Block(kind="conv"),
        ),
    ),
    data=Data(batch=3, length=4),
    training=Training(steps=2, microbatches=3),
)


def _of(model: nn.Module) -> list[nn.Module]:
    """Blocks that may run twice: those without running statistics."""
    return [block for block in model.blocks if not list(block.buffers())]  # type: ignore[union-attr,operator]


def _checkpointed(block: nn.Module, *, reentrant: bool = True) -> None:
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)  # type: ignore[method-assign]


class Reentrant(Ddp):
    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        for block in _of(model):
            _checkpointed(block)
        return super().build(model, case, mesh)


class ReentrantUnits(Fsdp2):
    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        for block in _of(model):
            _checkpointed(block)
        return super().build(model, case, mesh)


class Wrapped(Ddp):
    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
            if block in _of(model):
                model.blocks[number] = checkpoint_wrapper(  # type: ignore[index,operator]
                    block, checkpoint_impl=CheckpointImpl.REENTRANT
                )
        return super().build(model, case, mesh)


class Nonreentrant(Ddp):
    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        for block in _of(model):
            _checkpointed(block, reentrant=False)
        return super().build(model, case, mesh)


class Compiled(Ddp):
    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend="aot_eager")
        return super().build(model, case, mesh)


class Halves(Ddp):
    """Each weight is used twice, on one half of the batch each."""

    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = self._halves(layer)  # type: ignore[method-assign]
        return super().build(model, case, mesh)

    @staticmethod
    def _halves(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([F.linear(half, layer.weight, layer.bias) for half in x.chunk(2)])

        return forward


class Transposed(Ddp):
    """Gradients of activations have other strides."""

    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        def transposed(gradient: torch.Tensor) -> torch.Tensor:
            return gradient.transpose(-1, -2).contiguous().transpose(-1, -2)

        def hook(_: nn.Module, given: object, result: Any) -> None:
            if result.requires_grad:
                result.register_hook(transposed)

        for block in model.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(hook)  # type: ignore[operator]
        return super().build(model, case, mesh)


WAYS = (Transposed, Reentrant, ReentrantUnits, Wrapped, Nonreentrant, Compiled, Halves)


def _observed(observe: Callable[..., Observed], way: type) -> Observed:
    return observe(f"{way.__module__}:{way.__name__}", CASE)


@pytest.mark.every(8)
@pytest.mark.parametrize("way", WAYS)
def test_right_code_holds(observe: Callable[..., Observed], way: type) -> None:
    judgement = _observed(observe, way).judge()
    assert judgement.violations == ()
    assert judgement.statuses["gradient"] == "holds"
    if way is Halves:
        assert {"loss", "gradient"} <= set(judgement.estimated)
    if way is Nonreentrant:  # its graph is that of the reference
        assert judgement.estimated == ()


@pytest.mark.every(8)
@pytest.mark.parametrize("way", WAYS)
def test_an_average_that_is_left_out_is_named(observe: Callable[..., Observed], way: type) -> None:
    observed = _observed(observe, way)
    for key, tensor in observed.tensors.items():
        if key[1].role == "gradient":
            tensor *= CASE.world_size
    (violation,) = (v for v in observed.judge().violations if v.obligation == "gradient")
    assert "gradient x W" in violation.causes


class _Dropping:
    def _objective(self, loss: torch.Tensor, weight: float, count: int) -> torch.Tensor:
        self.number = (getattr(self, "number", -1) + 1) % count
        value: torch.Tensor = super()._objective(loss, weight, count)  # type: ignore[misc]
        return value * 0.0 if self.number == 1 else value


class ReentrantDropping(_Dropping, Reentrant):
    pass


class CompiledDropping(_Dropping, Compiled):
    pass


class HalvesDropping(_Dropping, Halves):
    pass


@pytest.mark.long
@pytest.mark.every(4)
@pytest.mark.parametrize("way", [ReentrantDropping, CompiledDropping, HalvesDropping])
def test_a_microbatch_that_is_dropped_is_named(observe: Callable[..., Observed], way: type) -> None:
    (violation,) = (v for v in _observed(observe, way).judge().violations if v.step == 0)
    assert violation.obligation == "gradient"
    assert violation.causes == ("microbatch dropped",)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("way", "name"), paired(WAYS, ["stem.weight", "blocks.0.up.weight", "head.weight"])
)
def test_an_element_that_is_a_little_wrong_is_found(
    observe: Callable[..., Observed], way: type, name: str
) -> None:
    observed = _observed(observe, way)
    shards = observed.places("gradient", "reduced", 0, name)
    start, largest = max(shards, key=lambda place: float(place[1].abs().max()))
    element = start + int(largest.abs().argmax())
    for first, shard in shards:
        if first <= element < first + len(shard):
            shard[element - first] *= 1 + 1e-4
    violation = observed.judge().violations[0]
    assert (violation.obligation, violation.tensors, violation.wrong) == ("gradient", (name,), 1)


def test_a_difference_of_one_bit_is_found_where_the_graph_is_the_same(
    observe: Callable[..., Observed],
) -> None:
    observed = observe("ddp", CASE)
    losses = observed.seen[0].steps[0].losses
    step = msgspec.structs.replace(
        observed.seen[0].steps[0], losses=(losses[0] * (1 + 2**-23), *losses[1:])
    )
    observed.seen[0] = msgspec.structs.replace(
        observed.seen[0], steps=(step, *observed.seen[0].steps[1:])
    )
    assert [v.obligation for v in observed.judge().violations] == ["loss"]


class StatisticsTwice(Ddp):
    """A batch norm that is checkpointed updates its running statistics twice."""

    def build(self, model: nn.Module, case: Case, mesh: Any) -> Built:
        _checkpointed(model.blocks[1])  # type: ignore[index,arg-type]
        return super().build(model, case, mesh)


def test_running_statistics_that_are_updated_twice_are_found(
    observe: Callable[..., Observed],
) -> None:
    violations = _observed(observe, StatisticsTwice).judge().violations
    assert violations[0].obligation == "buffers"
