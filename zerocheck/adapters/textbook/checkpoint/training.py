"""Non-tensor content of a checkpoint: `training.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from ....errors import CheckpointError

NOT_OPTIONS = ("params", "step", "foreach", "fused", "capturable", "differentiable")
"""Entries of a parameter group that do not say what its update is. A step count there is saved with
the states."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameter or buffer: its global shape and dtype; True if it has gradients."""

    shape: tuple[int, ...]
    dtype: str
    trains: bool


SavedOptions = dict[str, bool | int | float | str | tuple[float, ...] | None]
"""Options of a parameter group, as the optimizer of torch names them."""


class SavedTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training state in a checkpoint.

    world_size: number of ranks that saved; tensors: every parameter and buffer of the model, by
    name; groups: in the order of the optimizer; loss_scaler: None without loss scaling; loader:
    where the data stands.
    """

    format: Literal[1] = 1
    world_size: int
    tensors: dict[str, TensorSpec]
    groups: list[SavedOptions]
    loss_scaler: dict[str, float] | None
    loader: dict[str, int]


def described(model: nn.Module) -> dict[str, TensorSpec]:
    """Describe the parameters, tied ones once, and the buffers of a model."""
    return {
        name: TensorSpec(tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def options(groups: Iterable[dict[str, Any]]) -> list[SavedOptions]:
    """Return the options of a torch optimizer's groups."""
    return [{n: value for n, value in group.items() if n not in NOT_OPTIONS} for group in groups]


def decoded(data: bytes) -> SavedTraining:
    """Decode the bytes of `training.json`."""
    return msgspec.json.decode(data, type=SavedTraining)


def encoded(training: SavedTraining) -> bytes:
    """Encode the bytes of `training.json`."""
    return msgspec.json.format(msgspec.json.encode(training))


def check_fits(training: SavedTraining, model: nn.Module) -> None:
    """Raise CheckpointError, with the first difference, if it is the training of another model."""
    here = described(model)
    if lost := [name for name in here if name not in training.tensors]:
        raise CheckpointError(f"the checkpoint is of another model: it has no {lost[0]}")
    if more := [name for name in training.tensors if name not in here]:
        raise CheckpointError(f"the checkpoint is of another model: this one has no {more[0]}")
    for name, now in here.items():
        saved = training.tensors[name]
        if (saved.shape, saved.dtype) != (now.shape, now.dtype):
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {saved.dtype} {list(saved.shape)} "
                f"in it, and {now.dtype} {list(now.shape)} here"
            )


def random_states(device: str) -> dict[str, torch.Tensor]:
    """Return the states of this rank's random generators, by device: 1-D, uint8."""
    states = {"cpu": torch.get_rng_state()}
    if device == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Set the states of this rank's random generators."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
