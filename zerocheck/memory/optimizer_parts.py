"""Parts of a model by optimizer, and the ZeRO paper's formulas for the bytes of them all.

Muon updates the matrices in the blocks of a model, and AdamW all else: embeddings, heads, biases
and norms. That is how its author trains (Jordan et al., "Muon: An optimizer for hidden layers in
neural networks", 2024). Where a model has no list of blocks, all of its matrices are Muon's. Every
other optimizer has one part; of Adafactor's the means are counted too.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from glob import escape
from typing import NamedTuple

import msgspec
from torch import nn

from ..case.optimizer_options import is_matrix_of_muon
from ..case.schema import Optimizer
from ..models.parts import block_list
from ..optimizers import factored, state_elements
from .formulas import MEANS, HeldKind, StateKind, persistent, recipe, total, words
from .setup import Setup


class OptimizerPart(NamedTuple):
    """Number of elements of all parameters that have the same states.

    means: of rows, columns and elements of vectors, which Adafactor keeps in their place.
    """

    elements: int
    states: StateKind
    means: int = 0


def case_optimizer(setup: Setup, model: nn.Module) -> Optimizer:
    """Return the optimizer of a case for a model; Muon leaves what is outside of blocks."""
    if setup.optimizer != "muon":
        return setup.options
    found = block_list(model)
    inside = "" if found is None else f"{found[0]}."
    outside = tuple(
        escape(name)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and not name.startswith(inside)
    )
    return msgspec.structs.replace(setup.options, fallback=outside)


def parts_of(setup: Setup, model: nn.Module) -> tuple[OptimizerPart, ...]:
    """Return the parts of a whole model."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    every = sum(sizes.values())
    if setup.optimizer != "muon":
        return (OptimizerPart(every, setup.states, _means(setup, model)),)
    options = case_optimizer(setup, model)
    matrices = sum(
        p.numel()
        for name, p in model.named_parameters()
        if is_matrix_of_muon(options, name, p.shape)
    )
    return OptimizerPart(matrices, "muon"), OptimizerPart(every - matrices, "adamw")


def _means(setup: Setup, model: nn.Module) -> int:
    """Return the number of elements of factored states, and of others where there are some."""
    options = setup.options
    if not factored(options):
        return 0
    shapes = [(name, tuple(one.shape)) for name, one in model.named_parameters()]
    return sum(sum(state_elements(options, *one).values()) for one in shapes)


def total_of(
    parts: Sequence[OptimizerPart], ranks: int, stage: int, held: HeldKind = "fp32"
) -> Fraction:
    """Return the bytes that a rank holds between steps, of all parts (Figure 1, Table 1)."""
    shares = [total(one.elements, ranks, stage, recipe(held, one.states)) for one in parts]
    means = [total(one.means, ranks, stage, MEANS) for one in parts]
    return sum(shares + means, Fraction(0))


def gradients_of(
    parts: Sequence[OptimizerPart], ranks: int, stage: int, held: HeldKind = "fp32"
) -> Fraction:
    """Return the bytes of gradients among `total_of`."""
    kinds = [(one.elements, recipe(held, one.states)) for one in parts]
    shares = [persistent(count, ranks, stage, kind)["gradient"] for count, kind in kinds]
    return sum(shares, Fraction(0))


def words_of(parts: Sequence[OptimizerPart], stage: int, held: HeldKind = "fp32") -> str:
    """Return the formula of a stage, `"4 Psi + 12 Psi/N"`, for each part."""
    each = [words(stage, recipe(held, one.states)) + _of_means(one, stage) for one in parts]
    if len(parts) == 1:
        return each[0]
    named = zip(each, parts, strict=True)
    return " + ".join(f"({one} of {part.elements:,} by {part.states})" for one, part in named)


def _of_means(part: OptimizerPart, stage: int) -> str:
    """Return the term of a part's means, which are shared out as states are."""
    share = "/N" if stage >= 1 else ""
    return f" + 4 M{share}, M = {part.means:,} means" if part.means else ""


def paper_words(parts: Sequence[OptimizerPart]) -> str:
    """Return the bytes per parameter of mixed precision: `"2 + 2 + 12"`."""
    return " or ".join(f"2 + 2 + {recipe('mixed', one.states).states}" for one in parts)
