"""Reference with activation checkpointing that changes more than memory: a known bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def computing_again(model: nn.Module, *, same_draws: bool) -> Iterator[None]:
    """Compute each block once more in the backward within the context.

    same_draws: with the random numbers of the forward, and not with new ones. Blocks are the
    modules of the outermost lists in the model, which wrappers checkpoint; where it has no list,
    its children. The backward comes to them from the last to the first.
    """
    plain = {block: block.__dict__.get("forward") for block in _blocks(model)}
    for block in plain:
        block.forward = partial(_again, block.forward, same_draws)
    try:
        yield
    finally:
        for block, forward in plain.items():
            if forward is None:
                del block.__dict__["forward"]
            else:
                block.forward = forward


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists: list[nn.ModuleList] = []
    waiting = list(model.children())
    while waiting:
        one = waiting.pop()
        if isinstance(one, nn.ModuleList):
            lists.append(one)
        else:
            waiting += one.children()
    return [block for one in lists for block in one] or list(model.children())


def _again(forward: Callable[..., Any], same_draws: bool, *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*given, **named)
    return checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=same_draws, **named)
