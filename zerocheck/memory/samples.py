"""Samples of a simulated microbatch: token ids, or what the batch function of a factory draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import UsageError, failing
from ..models.user import Parts
from .setup import Setup


@dataclass(frozen=True, slots=True)
class MicrobatchSamples:
    """Tensors of one microbatch of one rank, and its loss.

    inputs: arguments of the model, the last of them keywords by the names in `keywords`; target:
    one of the inputs, or a tensor of its own; own: drawn by the batch function of a factory.
    """

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    keywords: tuple[str, ...]
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor]
    own: bool

    def on(self, device: str, *, data: bool = False, times: int = 1) -> MicrobatchSamples:
        """Return samples of the same shapes and dtypes, made on the device in the active mode.

        data: with the same values, else with any; times: so many of them in one tensor.
        """
        made: dict[int, torch.Tensor] = {}
        for tensor in (*self.inputs, self.target):
            if id(tensor) not in made:
                whole = tensor if times == 1 else torch.cat([tensor] * times)
                empty = torch.empty(whole.shape, dtype=whole.dtype, device=device)
                made[id(tensor)] = empty.copy_(whole) if data else empty
        inputs = tuple(made[id(tensor)] for tensor in self.inputs)
        return replace(self, inputs=inputs, target=made[id(self.target)])

    @property
    def words(self) -> tuple[str, ...]:
        """Shapes of the inputs that a factory's function draws: `(4, 3, 32, 32)`."""
        return tuple(str(tuple(tensor.shape)) for tensor in self.inputs) if self.own else ()


def samples_of(setup: Setup, parts: Parts | None) -> MicrobatchSamples:
    """Return the samples of a microbatch, with data on the CPU.

    parts: of a factory that returns them, None for a model that takes token ids of shape (B, S).
    Raises UsageError for a batch function that fails, and for sizes that it does not read.
    """
    if parts is None:
        tokens = torch.randint(2, (setup.batch, setup.sequence))
        return MicrobatchSamples((tokens,), tokens, (), loss_of_tokens, own=False)
    plain = Setup(model=setup.model)
    for option, value, default in (
        ("--batch", setup.batch, plain.batch),
        ("--sequence", setup.sequence, plain.sequence),
    ):
        if value != default:
            raise UsageError(
                f"{option} {value} is of token ids, and {parts.name} draws its batches itself; for "
                "token ids name a factory that returns the model alone"
            )
    with failing(f"the batch function of {parts.name} fails"):
        drawn = parts.drawn(torch.Generator().manual_seed(0))
    return MicrobatchSamples(drawn.inputs, drawn.target, drawn.keywords, parts.loss_of, own=True)


def loss_of_tokens(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of (batch, sequence, classes) in fp32, else the mean."""
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, torch.Tensor):
        raise UsageError(
            f"the model returns {type(outputs).__name__}; needed is a tensor, or what has `logits`"
        )
    if outputs.dim() == 3 and outputs.shape[:2] == target.shape:
        return F.cross_entropy(outputs.flatten(0, 1).float(), target.flatten())
    return outputs.float().mean()
