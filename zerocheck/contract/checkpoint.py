"""Checkpoints of code that looks like torch: its distributed state-dict API and dcp.

A checkpoint holds `model` and `optimizer` as `get_state_dict` gives them, and beside them `loader`,
`scaler` (if losses are scaled) and `rng`, the random state of each rank under its number.

Two faults of torch are listed (reports/findings: state-dict-invents-a-step-for-an-unused-parameter,
dcp-buffers-of-several-ranks). `avoids_torch_faults` does what their pages say to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from ..machine.devices import CPU, CUDA, placed, random_state, set_random_state
from .implementation import Loader, Saving

# A directory that holds an older checkpoint is what the contract allows.
warnings.filterwarnings("ignore", message="Detected an existing checkpoint in")

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Full = dict[tuple[str, str], torch.Tensor]
OtherStates = dict[str, Any]
"""What a checkpoint holds beside `model` and `optimizer`."""

_groups: dict[object, dist.ProcessGroup | None] = {}


def other_states(loader: Loader, scaler: torch.amp.GradScaler | None) -> OtherStates:
    """Return this rank's state to save next to the model and the optimizer."""
    states: OtherStates = {
        "loader": dict(loader.state_dict()),
        "rng": {str(dist.get_rank()): _random_state()},
    }
    if scaler is not None:
        states["scaler"] = scaler.state_dict()
    return states


def take_over(
    states: Mapping[str, Any], loader: Loader, scaler: torch.amp.GradScaler | None
) -> None:
    """Restore the state of `other_states` that was read. Without `rng`, this rank's stays."""
    loader.load_state_dict(states["loader"])
    if scaler is not None:
        scaler.load_state_dict(states["scaler"])
    state = states.get("rng", {}).get(str(dist.get_rank()))
    if state is not None:
        set_random_state(state.cpu().numpy().tobytes(), _device())


def _random_state() -> torch.Tensor:
    """Return this rank's random state, as in devices.random_state; 1-D, uint8."""
    return torch.frombuffer(bytearray(random_state(_device())), dtype=torch.uint8)


def _device() -> torch.device:
    """Return the GPU that this process uses, or the CPU, independent of the built objects."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return placed(CUDA if used else CPU)


def save(
    model: nn.Module,
    optimizers: Optimizers,
    states: OtherStates,
    directory: str,
    *,
    background: bool,
    avoids_torch_faults: bool = False,
    parted: bool = False,
) -> Saving | None:
    """Save model, optimizer and `states` by `dcp.save`; in the background by `dcp.async_save`.

    parted: ranks have different parameters, so that options are saved by parameter, not by group.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=parted)
    held, moments = _state_dict(model, optimizers, options, avoids_torch_faults=avoids_torch_faults)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True) if avoids_torch_faults else None
    whole: dict[str, Any] = {"model": held, "optimizer": moments, **states}
    return write(whole, directory, background=background, planner=planner)


def _state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    options: StateDictOptions | None = None,
    *,
    avoids_torch_faults: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `get_state_dict` of model and optimizer."""
    every = _listed(optimizers)
    unborn = [one for one in every if not one.state]
    held, moments = _whole_states(model, every, options)
    if avoids_torch_faults and len(unborn) == len(
        every
    ):  # it has made states, with a step that nobody took
        made = cast(dict[str, Any], moments)
        for one in unborn:
            one.state.clear()
            _uncount(one.param_groups)
        if "param_groups" not in made:  # flat
            return held, {key: one for key, one in made.items() if not key.startswith("state.")}
        _uncount(made["param_groups"])
        return held, {**made, "state": {}}
    return held, cast(dict[str, Any], moments)


def _listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def _whole_states(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: StateDictOptions | None
) -> tuple[dict[str, Any], Any]:
    """Return `get_state_dict`, which refuses a flat state of an optimizer without parameters.

    A stage of a pipeline may be frozen as a whole.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trains = any(group["params"] for group in groups)
    if trains or options is None or not options.flatten_optimizer_state_dict:
        held, moments = get_state_dict(model, optimizers, options=options)
        return held, moments
    return get_model_state_dict(model, options=options), {}


def _uncount(groups: Iterable[dict[str, Any]]) -> None:
    """Take back the step of groups that count theirs."""
    for group in groups:
        if "step" in group:
            group["step"] = 0


def write(
    states: dict[str, Any],
    directory: str,
    *,
    background: bool,
    planner: DefaultSavePlanner | None = None,
) -> Saving | None:
    """Write with dcp, at once or in the background."""
    if background:
        future = state_dict_saver.async_save(
            states, checkpoint_id=directory, planner=planner, process_group=background_group()
        )
        return cast(Saving, future)
    state_dict_saver.save(states, checkpoint_id=directory, planner=planner)
    return None


def load(
    model: nn.Module,
    optimizers: Optimizers,
    states: OtherStates,
    directory: str,
    *,
    parted: bool = False,
) -> None:
    """Load model, optimizer and `states` by `dcp.load`; `states` is that of `other_states` here.

    torch's optimizers make the state of a parameter at its first gradient, so that a checkpoint has
    none for a parameter that had no gradient yet. `get_state_dict` asks for one all the same, and
    `dcp.load` refuses. As users do, what the checkpoint lacks as a whole is left out; what it lacks
    in part is still refused.
    """
    reader = FileSystemReader(directory)
    kept = reader.read_metadata().state_dict_metadata
    flat = StateDictOptions(flatten_optimizer_state_dict=parted)
    every = _listed(optimizers)
    held, moments = _whole_states(model, every, flat)
    stateless = [
        name
        for name, state in moments.get("state", {}).items()
        if not any(f"optimizer.state.{name}.{key}" in kept for key in state)
    ]
    for name in stateless:
        del moments["state"][name]
    unborn = parted and not any(name.startswith("optimizer.state.") for name in kept)
    if unborn:
        moments = {key: one for key, one in moments.items() if not key.startswith("state.")}
    fit_rng(states, kept)
    read: dict[str, Any] = {"model": held, "optimizer": moments, **states}
    state_dict_loader.load(read, storage_reader=reader)
    set_model_state_dict(model, read["model"])
    states.update((name, read[name]) for name in states)
    if unborn or not moments:  # what get_state_dict has made is none
        for one in every:
            one.state.clear()
        return
    options = StateDictOptions(strict=not stateless, flatten_optimizer_state_dict=parted)
    set_optimizer_state_dict(model, optimizers, read["optimizer"], options=options)


def fit_rng(states: OtherStates, kept: Collection[str]) -> None:
    """Read the random state only if as many ranks wrote theirs as there are now.

    kept: the names that the checkpoint has.
    """
    if sum(name.startswith("rng.") for name in kept) != dist.get_world_size():
        states.pop("rng", None)


def export(
    model: nn.Module,
    optimizers: Optimizers,
    names: Collection[str],
    rename: Callable[[str], str],
    *,
    avoids_torch_faults: bool = False,
) -> Full:
    """Return the whole state on rank 0, {} elsewhere. names: parameters of the unwrapped model.

    FSDP1 on the CPU dies if it is to offload to the CPU: it frees what it then copies. Without
    offloading, every rank has the whole state.
    """
    buffers = {rename(name) for name, _ in model.named_buffers()}
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    offload = not (on_cpu and FullyShardedDataParallel.fsdp_modules(model))
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    held, moments = _state_dict(model, optimizers, options, avoids_torch_faults=avoids_torch_faults)
    return whole(held, moments.get("state", {}), names, buffers, rename)


def whole(
    held: Mapping[str, Any],
    moments: Mapping[str, Mapping[str, Any]],
    names: Collection[str],
    buffers: Collection[str],
    rename: Callable[[str], str],
) -> Full:
    """Return {(name, role): tensor} from whole state dicts by name, without tied aliases."""
    full: Full = {}
    for given, tensor in held.items():
        name = rename(given)
        if name in names:
            full[name, "parameter"] = tensor
        elif name in buffers:
            full[name, "buffer"] = tensor
    for given, state in moments.items():
        for role, value in state.items():
            full[rename(given), role] = torch.as_tensor(value)
    return full


def background_group() -> dist.ProcessGroup | None:
    """Return the process group of background checkpoints, made once per default group.

    Every rank calls this at the same point: making it is a collective. It is destroyed with the
    default group.
    """
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]
