"""Whole state as DeepSpeed itself reads it out, by each of its kinds of functions."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .library import (
    Engine,
    get_fp32_state_dict_from_zero_checkpoint,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    silent,
)
from .options import ReadOutKind

Whole = dict[tuple[str, str], torch.Tensor]


def whole(engine: Engine, model: nn.Module, kind: ReadOutKind, roles: Iterable[str]) -> Whole:
    """Parameters by `kind`, with `functions` the states of these roles too, and buffers.

    Every rank calls this. {} on a rank to which no parameter is given. Frozen parameters, and
    stage 0, have no `safe_get_*`: they are those of the state dict. A tied parameter is there under
    its first name. What promises fp32 is shown in it, whatever it is.
    """
    named = dict(model.named_parameters())
    buffers = {name for name, _ in model.named_buffers()}
    asked: Whole = {}
    if kind == "functions":
        asked.update(_functions(named, roles))
    if kind == "zero-to-fp32" and engine.zero_optimization():
        given: Mapping[str, Any] = {n: one.float() for n, one in _zero_to_fp32(engine).items()}
    else:
        given = _state_dict(engine)
    found: Whole = {
        (name, "parameter" if name in named else "buffer"): tensor.detach()
        for name, tensor in given.items()
        if name in named or name in buffers
    }
    return {**found, **asked} if found else {}


def _functions(
    named: Mapping[str, torch.Tensor], roles: Iterable[str]
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Iterate over the tensors that the `safe_get_*` functions return; these communicate."""
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        value = safe_get_full_fp32_param(parameter)
        if value is not None:
            yield (name, "parameter"), value.float()
        for role in roles:
            value = safe_get_full_optimizer_state(parameter, role)
            if value is not None:
                yield (name, role), value.float()


def _state_dict(engine: Engine) -> Mapping[str, Any]:
    """Return the state dict that `save_16bit_model` writes; with stage 3 on rank 0 only."""
    if engine.zero_optimization_partition_weights():
        return engine._consolidated_16bit_state_dict() or {}
    given: Mapping[str, Any] = engine.module_state_dict()
    return given


def _zero_to_fp32(engine: Engine) -> Mapping[str, Any]:
    """Save a checkpoint and return what `zero_to_fp32` reads from it; {} on other ranks than 0."""
    first = dist.get_rank() == 0
    where: list[str | None] = [tempfile.mkdtemp(prefix="zerocheck-") if first else None]
    dist.broadcast_object_list(where)
    assert where[0] is not None
    try:
        engine.save_checkpoint(where[0])
        if not first:
            return {}
        with silent():
            given: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(where[0])
        return given
    finally:
        dist.barrier()
        if first:
            shutil.rmtree(where[0], ignore_errors=True)
