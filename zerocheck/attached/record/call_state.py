"""State of a model that its calls depend on, next to inputs, parameters and buffers.

Random states of torch, Python and NumPy, and numbers that modules keep as plain attributes: the
temperature of a softmax that a script lowers, or a count of calls. The reference gets them all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import UsageError
from ...machine.devices import forked

Numbers = Mapping[str, float]
"""Numbers of modules, by the dotted name of the module and that of the attribute."""

UNREPEATABLE = (
    "the model gives other outputs for the same inputs and random states: it draws random numbers "
    "of its own, or keeps a state that is in no buffer"
)
OF_CUDNN = (
    "cuDNN keeps the random state of the dropout between layers of a recurrent module by itself; "
    "torch.backends.cudnn.enabled = False has torch draw it"
)


def torch_states() -> tuple[torch.Tensor, ...]:
    """Return the state of the generator of the CPU, and of the current GPU if it is used."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return tuple(states)


def host_states() -> dict[str, torch.Tensor]:
    """Return the states of the global generators of Python and NumPy, as int64.

    Each: its words, then the bits of the second normal number that it has drawn ahead, 0 for none.
    """
    _, words, ahead = random.getstate()
    states = {"python": _state(words, ahead)}
    of_numpy: Any = np.random.get_state(legacy=True)
    kind, keys, position, has, drawn = of_numpy
    if kind == "MT19937":
        states["numpy"] = _state((*keys.tolist(), position), drawn if has else None)
    return states


def set_host_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore what `host_states` returned; a generator that it has no state of is left alone."""
    if "python" in states:
        words, ahead = _parts(states["python"])
        random.setstate((random.getstate()[0], tuple(words), ahead))
    if "numpy" in states:
        words, ahead = _parts(states["numpy"])
        keys = np.array(words[:-1], np.uint32)
        np.random.set_state(("MT19937", keys, words[-1], ahead is not None, ahead or 0.0))


def _state(words: tuple[int, ...], ahead: float | None) -> torch.Tensor:
    bits = np.float64(0.0 if ahead is None else ahead).view(np.int64)
    return torch.tensor([*words, ahead is not None, int(bits)], dtype=torch.int64)


def _parts(state: torch.Tensor) -> tuple[list[int], float | None]:
    *words, has, bits = state.tolist()
    return words, float(np.int64(bits).view(np.float64)) if has else None


def draws_in_cudnn(model: nn.Module, device: str) -> bool:
    """Return True if a recurrent module draws its dropout in cuDNN. device: kind that it is on.

    Its random state is made from a seed of torch's generator when that was last set, and goes on by
    itself (get_dropout_state in aten/src/ATen/native/cudnn/RNN.cpp). Setting the generator, as for
    a reference, would have it made anew, and change what the run draws.
    """
    return (
        device == "cuda"
        and torch.backends.cudnn.enabled
        and any(
            isinstance(one, nn.RNNBase) and one.training and one.dropout > 0 and one.num_layers > 1
            for one in model.modules()
        )
    )


@contextmanager
def separate_random(device: torch.device) -> Iterator[None]:
    """Restore all random states afterwards: a reference draws nothing from those of the run."""
    before = host_states()
    try:
        with forked(device):
            yield
    finally:
        set_host_states(before)


def plain_model(factory: Callable[[], Any], device: torch.device) -> nn.Module:
    """Make the model of `reference=`. Raises UsageError if it makes none."""
    with separate_random(device):
        try:
            made = factory()
        except SystemExit as error:
            raise UsageError(f"the function of reference= exits ({error})") from error
    # A factory of `zerocheck run --model` gives more than the model.
    model = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"reference= must return the model that is not wrapped, got {type(model).__name__}"
        )
    return model


def numbers_of(model: nn.Module, name_of: Callable[[str], str]) -> dict[str, float]:
    """Return the finite int and float attributes of all modules. name_of: dotted name of one."""
    return {
        f"{name_of(name)}{attribute}": value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if type(value) in (int, float) and math.isfinite(value)
    }


class TrainedNumbers:
    """Numbers of a model that a training changes, or that its factory cannot know.

    Floats are taken as they are. Integers also say what a rank has of a model (its heads, under
    tensor parallelism), so they are taken only if they change after `first` was read.
    """

    def __init__(self, first: Numbers) -> None:
        self._first = first
        self._changed: set[str] = set()

    def note(self, now: Numbers) -> None:
        """Compare with what it was at first."""
        self._changed |= {name for name, one in now.items() if self._first.get(name, one) != one}

    def of(self, numbers: Numbers, known: Numbers) -> dict[str, float]:
        """Return those of a call that a reference must have. known: those of the call before."""
        return {
            name: one
            for name, one in numbers.items()
            if name in self._changed or (isinstance(one, float) and known.get(name) != one)
        }


def set_numbers(model: nn.Module, numbers: Numbers) -> None:
    """Give modules the numbers that they have in the run, where they have such an attribute."""
    modules = dict(model.named_modules())
    for name, value in numbers.items():
        path, _, attribute = name.rpartition(".")
        module: Any = modules.get(path)
        if module is not None and type(vars(module).get(attribute)) in (int, float):
            setattr(module, attribute, value)
