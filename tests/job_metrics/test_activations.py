"""Bytes of activations, against sums by hand."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerocheck.job_metrics.activations import Activations

ROWS, WIDTHS = 3, (4, 50, 60, 7)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)))


def weighed(*rows: int, checkpointed: bool = False) -> int | None:
    net = model()
    with Activations() as found:  # type: ignore[no-untyped-call]
        for count in rows:
            x = torch.ones(count, WIDTHS[0])
            y = checkpoint(net, x, use_reentrant=False) if checkpointed else net(x)
            y.sum().backward()
    return found.bytes  # type: ignore[no-any-return]


def test_outputs_of_layers_and_the_loss() -> None:
    """And the gradient of the loss. The transposed weights are views of parameters."""
    assert weighed(ROWS) == 4 * (ROWS * (WIDTHS[0] + sum(WIDTHS[1:])) + 2)


def test_the_most_of_several_microbatches() -> None:
    """Gradients of the first are no activations of the second, nor is its output."""
    larger = weighed(2 * ROWS)
    assert weighed(2 * ROWS, ROWS) == weighed(ROWS, 2 * ROWS) == larger


def test_checkpointing_saves_what_is_within() -> None:
    assert weighed(ROWS, checkpointed=True) == 4 * (ROWS * (WIDTHS[0] + WIDTHS[-1]) + 2)


def test_no_backward() -> None:
    with Activations() as found:  # type: ignore[no-untyped-call]
        model()(torch.ones(ROWS, WIDTHS[0]))
    assert found.bytes is None


def test_tensors_without_storage() -> None:
    """The training does not notice, and nothing is said of its activations."""
    net, weight = model(), torch.eye(WIDTHS[0]).to_sparse()
    with Activations() as found:  # type: ignore[no-untyped-call]
        y = net(torch.sparse.mm(weight * 2, torch.ones(WIDTHS[0], WIDTHS[0])))
        y.sum().backward()
    assert found.bytes is None
