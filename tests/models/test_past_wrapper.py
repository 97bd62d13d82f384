"""A loss that calls the module past its wrapper too."""

from __future__ import annotations

import torch

from zerocheck.case.schema import Case, Data
from zerocheck.contract.implementation import Microbatch
from zerocheck.models.batches import batch, loss_of
from zerocheck.models.network import build_model

CASE = Case(data=Data(past_wrapper=True))


def test_half_of_what_the_module_gives_is_added() -> None:
    """Whatever the wrapper does, what goes past it has a gradient of its own."""
    model = build_model(CASE)
    drawn = batch(CASE, step=0, rank=0, microbatch=0)
    wrapped: list[torch.Tensor] = []

    def wrapper(*inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = model(*inputs)
        outputs.register_hook(lambda gradient: wrapped.append(gradient))
        return outputs

    microbatch = Microbatch(
        inputs=drawn.inputs,
        target=drawn.target,
        seed=drawn.seed,
        loss_of=loss_of(CASE),
        past_wrapper=model,
    )
    loss = microbatch.loss(wrapper)
    assert torch.equal(loss, loss_of(CASE)(model(*drawn.inputs) * 1.5, drawn.target))
    loss.backward()
    (through,) = wrapped
    head = model.get_parameter("head.bias")
    assert head.grad is not None
    torch.testing.assert_close(head.grad, 1.5 * through.sum((0, 1)))
