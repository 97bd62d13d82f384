"""Estimated round-off of right executions whose kernels are not those of the reference.

A compiler fuses operations and orders additions as it likes, so the round-off of its results is not
derived but estimated: the reference runs again with every parameter and every module output
perturbed by one unit of round-off, up or down at random; so are the terms that cancel within a
normalization (operator_noise.py). The change of a result is multiplied by MARGIN. A result that
does not change at all gets a tolerance of MARGIN roundings of its own, plus underflow.

The runs stand for one rounding of each operation, and a kernel may round several times; MARGIN is
for that. It is not derived: a verdict on such a bound is an estimate, and is reported as one.

There are two forms. `estimate_by_tensor` is for cases whose kernels are known to differ: it pools a
whole tensor. `estimate_by_element` is used only where bits differ although the kernels are those of
the reference, since the code under test runs the model by another autograd graph: activation
checkpointing, a custom forward, another order of accumulation. Each element then has its own
estimate, from more runs, so that a wrong element is not hidden by the round-off of a larger one.
The result of every operator is perturbed (operator_noise.py), and the largest change in
REPLICAS_EACH runs is multiplied by MARGIN_EACH: where changes are normally distributed, that is
less than one standard deviation with a chance of 0.26 ** REPLICAS_EACH, 1e-7. Over checkpointed,
compiled and rewritten forwards, right code used at most a third of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from zerocheck_reference import unit_roundoff

from ..execution.operator_noise import MARGIN_EACH
from ..floating_point import NEXT
from .layout import ParameterLayout
from .local import Passes

MARGIN = 16.0
REPLICAS = 2
"""Runs with what is computed moved."""


class Tolerances(NamedTuple):
    """Tolerances of the ranks' results in a step.

    loss: each; gradient: per element, the sums over ranks and microbatches, in float64; buffers:
    by name, each element.
    """

    loss: float
    gradient: torch.Tensor | float
    buffers: Mapping[str, float] | None


EXACT = Tolerances(0.0, 0.0, None)
"""Where kernels are those of one device: bits must agree."""


def estimate_by_tensor(
    passes: Passes, replicas: Sequence[Passes], layout: ParameterLayout
) -> Tolerances:
    """Estimate tolerances from the reference's passes and its perturbed replicas."""
    gradient = torch.zeros(layout.size, dtype=torch.float64)
    for place in layout.places:
        if place.stop == place.start:
            continue
        here = slice(place.start, place.stop)
        local = passes.gradients[..., here].double()
        least = NEXT * place.format.u * _largest(local) + place.format.eta
        moved = [_largest(replica.gradients[..., here].double() - local) for replica in replicas]
        gradient[here] = MARGIN * float(torch.stack([least, *moved]).amax(0).sum())
    return Tolerances(_loss(passes, replicas, MARGIN), gradient, _buffers(passes, replicas, MARGIN))


def estimate_by_element(
    passes: Passes, replicas: Iterable[Passes], layout: ParameterLayout
) -> Tolerances:
    """Estimate the gradient's tolerance element by element. replicas: taken one by one."""
    gradients = passes.gradients.double()
    largest = gradients.abs()
    for place in layout.places:
        largest[..., place.start : place.stop] *= NEXT * place.format.u
    largest.nan_to_num_(nan=0.0, posinf=0.0)
    rest: list[Passes] = []
    for replica in replicas:
        torch.maximum(largest, _finite(replica.gradients.double() - gradients), out=largest)
        rest.append(replica.without_gradients())
    gradient = MARGIN_EACH * largest.sum((0, 1))
    return Tolerances(
        _loss(passes, rest, MARGIN_EACH), gradient, _buffers(passes, rest, MARGIN_EACH)
    )


def _loss(passes: Passes, replicas: Sequence[Passes], margin: float) -> float:
    losses = torch.tensor(passes.losses, dtype=torch.float64)
    moved = [torch.tensor(replica.losses, dtype=torch.float64) - losses for replica in replicas]
    unit = NEXT * unit_roundoff(torch.float32)
    return margin * max(float(_finite(one).max()) for one in (unit * losses, *moved))


def _buffers(passes: Passes, replicas: Sequence[Passes], margin: float) -> dict[str, float]:
    """Estimate each buffer's tolerance; integer buffers have none."""
    found: dict[str, float] = {}
    for rank, buffers in enumerate(passes.buffers):
        for name, buffer in buffers.items():
            if not buffer.is_floating_point() or not buffer.numel():
                continue
            unit = NEXT * unit_roundoff(buffer.dtype)
            each = [
                unit * buffer.double(),
                *(replica.buffers[rank][name].double() - buffer.double() for replica in replicas),
            ]
            most = margin * max(float(_finite(one).max()) for one in each)
            found[name] = max(found.get(name, 0.0), most)
    return found


def _largest(gradients: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitude, (ranks, microbatches)."""
    return _finite(gradients).amax(-1)


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.abs().nan_to_num(nan=0.0, posinf=0.0)
