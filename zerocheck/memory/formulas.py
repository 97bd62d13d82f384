"""Formulas of the ZeRO paper for bytes per rank and communication per step. Imports no torch.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC20 (arXiv 1910.02054): section 3.1 (bytes of mixed-precision Adam), section 5
with Figure 1 and Table 1 (bytes per stage), section 7 (communication). Psi is the number of
parameters, N that of the ranks, K the bytes of optimizer state per parameter.

    stage  placement                                   mixed precision, Adam (K = 12)
    0      all replicated (data parallel)              (2 + 2 + K) Psi        = 16 Psi
    1      optimizer states are sharded (P_os)         (2 + 2 + K/N) Psi      = 4 Psi + 12 Psi/N
    2      gradients too (P_os+g)                      2 Psi + (2 + K)/N Psi  = 2 Psi + 14 Psi/N
    3      parameters too (P_os+g+p)                   (2 + 2 + K)/N Psi      = 16 Psi/N

All of it is persistent memory: activations, buckets and what is gathered for a moment come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from ..case.schema import OptimizerKind
from ..errors import UsageError, unknown

STAGES = (0, 1, 2, 3)
StateKind = Literal[OptimizerKind, "momentum", "amsgrad"]
"""Optimizer by its states: `momentum` is sgd with them, `amsgrad` adam."""
PrecisionKind = Literal["mixed", "fp32"]
HeldKind = Literal["mixed", "mixed with fp32 gradients", "fp32", "fp32 with masters"]
"""Way in which weights and gradients are held. The last: in fp32, and the optimizer updates a copy
of the weights, as DeepSpeed does from stage 1 on. The second: `grad_accum_dtype` of DeepSpeed."""

_WITH: Mapping[int, tuple[StateKind, ...]] = {
    0: ("sgd", "adafactor"),
    1: ("momentum", "adagrad", "rmsprop", "asgd", "muon"),
    2: ("adam", "adamw", "nadam", "radam", "adamax", "adadelta", "rprop"),
    3: ("amsgrad",),
}
STATES = {kind: count for count, kinds in _WITH.items() for kind in kinds}
"""Tensors of a parameter's size that the optimizer keeps: none, the momentum, two moments, and
with amsgrad the largest second moment. Of torch's others, as torch/optim makes them; the step count
and other numbers (4 bytes each per tensor in torch) aside. Muon: of its matrices; the rest of a
model has another optimizer. Adafactor has none: its means of rows and columns are counted apart."""


@dataclass(frozen=True, slots=True)
class BytesRecipe:
    """Bytes per parameter: of the parameter that computes, of its gradient, of optimizer states.

    states: K in the paper; in mixed precision the fp32 master weight is one of them.
    """

    parameter: int
    gradient: int
    states: int

    @property
    def total(self) -> int:
        """Bytes per parameter without sharding."""
        return self.parameter + self.gradient + self.states


MEANS = BytesRecipe(0, 0, 4)
"""Bytes of each mean that Adafactor keeps in fp32."""


def recipe(held: HeldKind = "mixed", optimizer: StateKind = "adam") -> BytesRecipe:
    """Return the bytes per parameter by section 3.1 of the paper.

    Mixed precision is 2 + 2 + K with K = 4 (master) + 4 per state; fp32 is 4 + 4 + 4 per state, and
    4 of a master where there is one.

    Raises UsageError for other words.
    """
    if optimizer not in STATES:
        raise unknown("optimizer", optimizer, STATES)
    states = 4 * STATES[optimizer]
    if held == "mixed":
        return BytesRecipe(2, 2, 4 + states)
    if held == "mixed with fp32 gradients":
        return BytesRecipe(2, 4, 4 + states)
    if held == "fp32":
        return BytesRecipe(4, 4, states)
    if held == "fp32 with masters":
        return BytesRecipe(4, 4, 4 + states)
    raise unknown("precision", held, get_args(PrecisionKind))


def persistent(
    elements: int, ranks: int, stage: int, kind: BytesRecipe | None = None
) -> dict[str, Fraction]:
    """Return the bytes that a rank holds between steps, by parameter, gradient and optimizer.

    elements: Psi; ranks: N; kind: mixed-precision Adam by default. Exact fractions: no padding.
    Raises UsageError for an unknown stage, no ranks or negative elements.
    """
    kind = kind or recipe()
    if stage not in STAGES:
        raise unknown("stage", str(stage), map(str, STAGES))
    if ranks < 1 or elements < 0:
        raise UsageError(
            f"{elements} elements on {ranks} ranks: needed are 0 or more, on 1 or more"
        )
    cut = Fraction(1, ranks)
    return {
        "parameter": elements * kind.parameter * (cut if stage >= 3 else Fraction(1)),
        "gradient": elements * kind.gradient * (cut if stage >= 2 else Fraction(1)),
        "optimizer": elements * kind.states * (cut if stage >= 1 else Fraction(1)),
    }


def total(elements: int, ranks: int, stage: int, kind: BytesRecipe | None = None) -> Fraction:
    """Return the bytes that a rank holds between steps (Figure 1, Table 1)."""
    return sum(persistent(elements, ranks, stage, kind).values(), Fraction(0))


def words(stage: int, kind: BytesRecipe) -> str:
    """Return the formula of a stage: `"4 Psi + 12 Psi/N"`."""
    cut = kind.states + kind.gradient * (stage >= 2) + kind.parameter * (stage >= 3)
    shares = {"Psi": kind.total - cut * (stage > 0), "Psi/N": cut * (stage > 0)}
    return " + ".join(f"{count} {unit}" for unit, count in shares.items() if count)


def saving(elements: int, ranks: int, stage: int, kind: BytesRecipe | None = None) -> Fraction:
    """Return the bytes per rank less than stage 0.

    For stage 1 it is K Psi (1 - 1/N), that is 12 Psi (1 - 1/N).
    """
    return total(elements, ranks, 0, kind) - total(elements, ranks, stage, kind)


def saved_share(ranks: int, stage: int, kind: BytesRecipe | None = None) -> Fraction:
    """Return the saving as a share of stage 0.

    In fp32 with Adam it is 1/2 and 3/4 of (1 - 1/N) for stages 1 and 2.
    """
    return saving(1, ranks, stage, kind) / total(1, ranks, 0, kind)


def redundancy(ranks: int, stage: int, kind: BytesRecipe | None = None) -> Fraction:
    """Return the bytes of all ranks over those of one copy: N for stage 0, 1 for stage 3."""
    return ranks * total(1, ranks, stage, kind) / total(1, 1, 0, kind)


def communicated(elements: int, stage: int) -> int:
    """Return the elements that a rank moves per step, for large N: 2 Psi, 3 Psi in stage 3.

    Section 7. Stages 0 to 2: a reduce-scatter and an all-gather, of Psi each. Stage 3: the
    parameters are gathered for the forward and again for the backward, and the gradients are
    reduce-scattered.
    """
    if stage not in STAGES:
        raise unknown("stage", str(stage), map(str, STAGES))
    return (3 if stage == 3 else 2) * elements
