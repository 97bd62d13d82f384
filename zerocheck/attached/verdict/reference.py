"""Local gradient of the unwrapped model on one device, and its error bound.

The bits of a local gradient depend on kernels, alignment and the order of additions, which the run
chooses as it likes (torch.compile, cuDNN, FSDP's flat parameters). So its round-off is not derived
but estimated: all parameters are moved by one unit of round-off, up or down at random, and the
gradients of the outputs by what sums over them round (summation_noise.py). How far the gradient of
a tensor moves is multiplied by MARGIN, as in judge/estimate.py. One that does not move is rounded
at the end all the same, there and here.

In bf16 an element then may be off by half of the largest one. So it is also estimated how far the
moves go along the gradient itself, where errors of its elements cancel: see gradient_scale.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from zerocheck_reference import unit_roundoff

from ...contract.names import unwrapped
from ...errors import UsageError, did_you_mean
from ...floating_point import NEXT, U
from ...judge import vectors
from ...judge.compare import all_finite
from ...judge.estimate import MARGIN, REPLICAS
from ...judge.pieces import split
from ..checks.workers import in_threads
from ..record.call_state import UNREPEATABLE, plain_model, separate_random
from ..record.casts import Casts, casting, casting_buffers
from ..record.dtypes import dtype_of
from ..record.forwards import Forward, dotted, entered, tensors_in
from ..record.holdings import local
from ..record.model_hooks import ScriptHook, hooks_missing
from ..record.repeatable import Digest, digest, repeats
from .adopted import adopt, with_adapters
from .gradient_scale import NARROW_REPLICAS, Move, along
from .summation_noise import Pair, SumNoise
from .token_weights import TokenWeights, logits_of, weights_of

Factory = Callable[[], nn.Module]


@dataclass(frozen=True)
class Local:
    """Local gradients of one rank.

    gradients[name][m]: of microbatch m, flat fp32 on the CPU, None where it has none; noise[name]:
    the largest error of an element of their sum; sway[name]: how far the moves of that sum go along
    it, infinite where that was not asked; tokens: weights of the tokens of each microbatch; reason:
    why these say nothing of the run, empty where they do; unlike: an output of the run that is not
    that of the reference, in words; None where none was compared.
    """

    gradients: Mapping[str, Sequence[torch.Tensor | None]]
    noise: Mapping[str, float]
    sway: Mapping[str, float]
    tokens: Sequence[TokenWeights] = ()
    reason: str = ""
    unlike: str | None = None


class Reference:
    """Unwrapped model with the parameters of the step.

    run: model of the run, None in a replay; what libraries put on it is put on this one as well.
    tied: names of each parameter that has several.
    """

    def __init__(
        self, factory: Factory, device: torch.device, run: nn.Module | None = None
    ) -> None:
        model = plain_model(factory, device)
        if run is not None:
            _check_new(run, model)
            with separate_random(device):
                model = with_adapters(run, model)
        self.device = device
        self._first: Digest = ()  # of the outputs of the first call
        self._samples: list[dict[str, torch.Tensor]] = []  # of the outputs of the last calls
        self.model = model.to(device)
        self._parameters = {unwrapped(name): p for name, p in self.model.named_parameters()}
        names_of: dict[int, list[str]] = {}
        for name, one in self.model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(one), []).append(unwrapped(name))
        self.tied = [names for names in names_of.values() if len(names) > 1]
        modules = (name for name, _ in self.model.named_modules())
        buffers = (name for name, _ in self.model.named_buffers())
        names = (*modules, *buffers, *self._parameters)
        self._parts = {part for name in names for part in name.split(".")}
        if run is not None:
            adopt(run, self.model, self._bare)

    def keep(self, run: nn.Module) -> None:
        """Take out the modules that the model of the run lacks: another stage has them."""
        kept = frozenset(self._bare(dotted(name)) for name, _ in run.named_modules())
        _prune(self.model, "", kept)
        self._parameters = {unwrapped(name): p for name, p in self.model.named_parameters()}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UsageError unless it has the parameters of the run. shapes: by name."""
        self._take_names(shapes)
        for name, shape in shapes.items():
            if name not in self._parameters:
                near = did_you_mean(name, self._parameters)
                raise UsageError(f"the model of reference= has no parameter {name!r}{near}")
            given = tuple(self._parameters[name].shape)
            if given != shape:
                raise UsageError(
                    f"{name} of the model of reference= has the shape {list(given)}, that of the "
                    f"run has {list(shape)}"
                )
        for name in self._parameters:
            if name not in shapes:
                near = did_you_mean(name, shapes)
                raise UsageError(f"the run has no parameter {name!r} of reference={near}")

    def lacks(self, hooks: Sequence[ScriptHook]) -> str:
        """Return why its gradient is not that of a run with these hooks, or an empty text."""
        return hooks_missing(hooks, self.model, self._bare)

    def _take_names(self, names: Iterable[str]) -> None:
        """Know the parameters by the names of the run, if those differ by wrappers alone."""
        by_bare_name = {self._bare(name): one for name, one in self._parameters.items()}
        theirs = {self._bare(name): name for name in names}
        if by_bare_name.keys() == theirs.keys():
            self._parameters = {theirs[bare]: one for bare, one in by_bare_name.items()}

    def _within_wrappers(self, forward: Forward) -> Forward:
        """Return the call of the wrapped module, with names of the reference."""
        inner = [one for name, one in forward.inner_autocast.items() if not self._bare(name)]
        return replace(
            forward,
            autocast=inner[-1] if inner else forward.autocast,
            other_mode=tuple(map(self._bare, forward.other_mode)),
            dropout={self._bare(name): one for name, one in forward.dropout.items()},
            numbers={self._bare_number(name): one for name, one in forward.numbers.items()},
        )

    def _bare_number(self, name: str) -> str:
        path, dot, attribute = name.rpartition(".")
        return f"{self._bare(path + dot)}{attribute}"

    def _bare(self, name: str) -> str:
        """Remove from a name the parts that no module or tensor of the reference has.

        They come from wrappers that `unwrapped` does not know, such as that of Fabric.
        """
        return ".".join(part for part in name.split(".") if not part or part in self._parts)

    def load(self, name: str, whole: torch.Tensor, dtype: torch.dtype, *, trains: bool) -> None:
        """Put a parameter in. whole: flat; dtype: that of the run, which a script may cast."""
        parameter = self._parameters[name]
        parameter.requires_grad_(trains)
        parameter.data = parameter.data.to(dtype)
        with torch.no_grad():
            parameter.copy_(whole.view(parameter.shape))

    def local(
        self,
        forwards: Sequence[Forward],
        buffers: Mapping[str, torch.Tensor],
        *,
        tokens: bool = False,
        casts: Casts | None = None,
    ) -> Local:
        """Return the gradients of these calls.

        buffers: those that the run had before them; tokens: with the weights of tokens; casts: of
        the run's mixed precision.
        """
        buffers = {self._bare(name): one for name, one in buffers.items()}
        forwards = [self._within_wrappers(one) for one in forwards]
        if not forwards:  # another rank has those of whole samples
            nothing = dict.fromkeys(self._parameters, 0.0)
            return Local({name: [] for name in nothing}, nothing, nothing)
        weights: list[TokenWeights] = []
        with separate_random(self.device):
            first = self._run(forwards, buffers, casts, weights if tokens else None)
            outputs = self._samples
            moves_of_outputs: list[list[dict[str, torch.Tensor]]] = []
            if wrong := _not_finite(first):
                return Local(first, {}, {}, weights, wrong)
            again = partial(self._outputs, forwards[0], buffers, casts)
            if not repeats(again, self._first, self.device.type):
                return Local(first, {}, {}, weights, UNREPEATABLE)
            noise = dict.fromkeys(self._parameters, 0.0)
            kept = {name: p.detach().reshape(-1).clone() for name, p in self._parameters.items()}
            unit = max((_unit(forward, kept, casts) for forward in forwards), default=0.0)
            narrow = unit > NEXT * U
            sway = dict.fromkeys(self._parameters, 0.0 if narrow else math.inf)
            for number in range(NARROW_REPLICAS if narrow else REPLICAS):
                self._move(kept, unit, number)
                with SumNoise(min(unit, NEXT * U), number).watching(self.model) as noisy:
                    moved = self._run(forwards, buffers, casts, noisy=noisy)
                moves_of_outputs.append(self._samples)
                for name, gradients in moved.items():
                    moves = _moves(gradients, first[name])
                    if moves:
                        apart = MARGIN * max(one.largest for one in moves)
                        rounded = unit * max(one.size for one in moves)
                        noise[name] = max(noise[name], apart, rounded)
                        sway[name] = max(sway[name], along(moves, unit))
        unlike = _unlike(forwards, outputs, moves_of_outputs, unit)
        return Local(first, noise, sway, weights, unlike=unlike)

    def _run(
        self,
        forwards: Sequence[Forward],
        buffers: Mapping[str, torch.Tensor],
        casts: Casts | None,
        weights: list[TokenWeights] | None = None,
        noisy: SumNoise | None = None,
    ) -> dict[str, list[torch.Tensor | None]]:
        """Return the gradients of each call.

        weights: list that takes those of tokens; noisy: moves the gradients that are given.
        """
        found: dict[str, list[torch.Tensor | None]] = {name: [] for name in self._parameters}
        self._samples = []
        self._load_buffers(buffers)
        with casting_buffers(self.model, casts.buffers if casts is not None else ""):
            self._add(found, forwards, casts, weights, noisy)
        return found

    def _load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                known = buffers.get(self._bare(unwrapped(name)))
                if known is not None:
                    buffer.data = buffer.data.to(known.dtype)
                    buffer.copy_(known)

    def _outputs(
        self, forward: Forward, buffers: Mapping[str, torch.Tensor], casts: Casts | None
    ) -> Digest:
        """Call the model once; return a digest of its outputs."""
        self._load_buffers(buffers)
        narrow = casting_buffers(self.model, casts.buffers if casts is not None else "")
        with narrow, torch.enable_grad():
            return digest(tensors_in(self._called(forward, casts)).values())

    def _add(
        self,
        found: dict[str, list[torch.Tensor | None]],
        forwards: Sequence[Forward],
        casts: Casts | None,
        weights: list[TokenWeights] | None,
        noisy: SumNoise | None,
    ) -> None:
        """Add the gradients of each call to those found."""
        for number, forward in enumerate(forwards):
            for parameter in self._parameters.values():
                parameter.grad = None
            with torch.enable_grad():
                outputs = tensors_in(self._called(forward, casts))
                self._samples.append(forward.sampled(outputs))
                if not number and noisy is None:
                    self._first = digest(outputs.values())
                pairs: Sequence[Pair] = [
                    _pair(outputs, path, gradient) for path, gradient in forward.returned.items()
                ]
                pairs = pairs if noisy is None else noisy.moved(pairs)
                logits = None if weights is None else logits_of([*outputs.values()])
                if logits is not None:
                    logits.retain_grad()
                torch.autograd.backward([one for one, _ in pairs], [one for _, one in pairs])
                if weights is not None:
                    weights.append(weights_of(logits, None if logits is None else logits.grad))
            for name, parameter in self._parameters.items():
                grad = parameter.grad
                found[name].append(None if grad is None else _on_host(grad.reshape(-1)))
                parameter.grad = None

    def _called(self, forward: Forward, casts: Casts | None) -> Any:
        if casts is None:
            return entered(forward, self.model, self.device)
        with casting(self.model, casts, self._bare) as parameters:
            return entered(forward, self.model, self.device, parameters)

    def _move(self, kept: Mapping[str, torch.Tensor], unit: float, number: int) -> None:
        bits = np.random.Generator(np.random.PCG64(number))
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                was = kept[name]
                moved = torch.empty_like(was)
                for here in split(was.numel()):
                    there = was[here].double()
                    up = np.unpackbits(np.frombuffer(bits.bytes(-(-len(there) // 8)), np.uint8))
                    factor = torch.from_numpy(up[: len(there)]).to(self.device).double()
                    moved[here] = there.mul_(factor.mul_(2 * unit).add_(1 - unit))
                parameter.copy_(moved.view(parameter.shape))


def _prune(module: nn.Module, path: str, kept: frozenset[str]) -> None:
    for name, child in [*module.named_children()]:
        inside = f"{path}{name}."
        if inside in kept:
            _prune(child, inside, kept)
        elif isinstance(module, (nn.ModuleDict, nn.ModuleList, nn.Sequential)):
            del module._modules[name]
        else:
            setattr(module, name, None)


def _check_new(run: nn.Module, model: nn.Module) -> None:
    """Raise UsageError for a reference that has tensors of the run: it would change them."""
    mine = {id(one) for one in run.parameters()}
    places = {local(one).untyped_storage().data_ptr() for one in run.parameters()} - {0}
    for name, one in model.named_parameters():
        if id(one) in mine or local(one).untyped_storage().data_ptr() in places:
            raise UsageError(
                f"{name} of the model of reference= is the parameter that is trained; it must make "
                "a new model each time it is called"
            )


def _unlike(
    forwards: Sequence[Forward],
    outputs: Sequence[Mapping[str, torch.Tensor]],
    moved: Sequence[Sequence[Mapping[str, torch.Tensor]]],
    unit: float,
) -> str | None:
    """Return the first output of the run that is not that of the reference, in words, or "".

    None if none is compared. moved: the outputs with parameters moved by `unit`; see above for
    MARGIN.
    """
    found = None
    for number, (forward, mine) in enumerate(zip(forwards, outputs, strict=True)):
        for path, seen in forward.outputs.items():
            there = mine.get(path)
            if there is None or there.shape != seen.shape or not len(there):
                continue
            found = ""
            apart = max(float((one[number][path] - there).abs().max()) for one in moved)
            bound = max(MARGIN * apart, unit * float(there.abs().max()))
            if not float((seen.to(there.device) - there).abs().max()) <= bound:
                what = f"the output {path}" if path else "the output"
                what += f" of the model in microbatch {number}"
                return f"{what} is not that of reference= for the same inputs"
    return found


def _on_host(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in fp32 on the CPU, itself if it is that."""
    if gradient.device.type == "cpu":
        return gradient.float()
    return vectors.copy(gradient, torch.float32)


def _pair(outputs: Mapping[str, torch.Tensor], path: str, gradient: torch.Tensor) -> Pair:
    """Return an output of the reference with the gradient of that output in the run."""
    output = outputs.get(path)
    if output is None or output.shape != gradient.shape:
        there = ", ".join(f"{name} {list(one.shape)}" for name, one in outputs.items())
        raise UsageError(
            f"the output {path or 'itself'} {list(gradient.shape)} of the model got a gradient, "
            f"and the model of reference= has no such output (it has: {there or 'none'}); it must "
            "return for the same inputs what the model that was attached returns"
        )
    return output, gradient.to(output.device, output.dtype)


def _not_finite(gradients: Mapping[str, Sequence[torch.Tensor | None]]) -> str:
    """Return which local gradient is not finite, or an empty text."""
    for name, each in gradients.items():
        for microbatch, gradient in enumerate(each):
            if gradient is not None and not all_finite(gradient):
                return f"the local gradient of {name} in microbatch {microbatch} is not finite"
    return ""


def _unit(forward: Forward, parameters: Mapping[str, torch.Tensor], casts: Casts | None) -> float:
    """Return the relative distance to the next number in the narrowest dtype of the computation.

    It is twice the unit round-off.
    """
    dtypes = {p.dtype for p in parameters.values() if p.dtype != torch.float64}
    if forward.autocast is not None:
        dtypes.add(forward.autocast[1])
    if casts is not None:
        dtypes.update(dtype_of(one) for one in (casts.compute, casts.buffers) if one)
    return NEXT * max((unit_roundoff(dtype) for dtype in dtypes), default=0.0)


def _moves(
    moved: Sequence[torch.Tensor | None], first: Sequence[torch.Tensor | None]
) -> list[Move]:
    """Return, by pieces, how far the sum over microbatches moved. Nothing where one has none."""
    now, before = ([one for one in all_ if one is not None] for all_ in (moved, first))
    if not now or not before:
        return []

    def move(here: slice) -> Move:
        was = _summed(before, here)
        return Move.of(_summed(now, here).sub_(was).nan_to_num_(nan=0.0), was)

    return [*in_threads(move, split(before[0].numel()))]


def _summed(gradients: Sequence[torch.Tensor], here: slice) -> torch.Tensor:
    total = gradients[0][here].double()
    for one in gradients[1:]:
        total += one[here]
    return total
