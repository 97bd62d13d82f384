"""A sharder whose leaves take gradients in the dtype of the reduction, as FSDP2's do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerocheck
from zerocheck.contract import Semantics


def _narrow(module: nn.Module, _: object) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.grad_dtype = torch.bfloat16


class UsesInBf16(zerocheck.BuiltImplementation):
    """All ranks have all of the model. It is asked for cases that reduce in bf16."""

    semantics = Semantics(accumulate_dtype="bf16", reduce="bf16")
    capabilities = frozenset({"microbatches", "precision"})

    def build(self, model: nn.Module, case: Any, mesh: Any) -> Any:
        for module in model.modules():
            module.register_forward_pre_hook(_narrow)
        return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        yield
        if last:
            for parameter in self.built.model.parameters():
                grad, parameter.grad = parameter.grad, None
                if grad is not None:
                    dist.all_reduce(grad)
                    parameter.grad_dtype = torch.float32
                    parameter.grad = (grad / dist.get_world_size()).float()
