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
from .experts import expert_parameters
from .formulas import MEANS, HeldKind, StateKind, persistent, recipe, words
from .setup import Setup


class OptimizerPart(NamedTuple):
    """Number of elements of all parameters that have the same states.

    means: of rows, columns and elements of vectors, which Adafactor keeps in their place; divided:
    ranks that experts are divided over, so that as many times fewer ranks share each of these.
    """

    elements: int
    states: StateKind
    means: int = 0
    divided: int = 1

    def shares(self, ranks: int, stage: int, held: HeldKind) -> dict[str, Fraction]:
        """Return the bytes that a rank holds, by parameter, gradient and optimizer."""
        ranks //= self.divided
        each = persistent(self.elements, ranks, stage, recipe(held, self.states))
        means = persistent(self.means, ranks, stage, MEANS)
        return {name: size + means[name] for name, size in each.items()}


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
    """Return the parts of a model: of each optimizer, experts that are divided apart."""
    options, divided = case_optimizer(setup, model), setup.expert_parallel
    experts = expert_parameters(model) if divided > 1 else ()
    kinds: list[StateKind] = [setup.states] if setup.optimizer != "muon" else ["muon", "adamw"]
    parts = {(kind, 1): OptimizerPart(0, kind) for kind in kinds}
    for name, one in model.named_parameters():
        matrix = setup.optimizer != "muon" or is_matrix_of_muon(options, name, one.shape)
        key = kinds[0 if matrix else 1], divided if one in experts else 1
        part = parts.get(key, OptimizerPart(0, key[0]))
        means = 0  # elements of factored states, and of others where there are some
        if factored(options):
            means = sum(state_elements(options, name, tuple(one.shape)).values())
        sizes = part.elements + one.numel(), key[0], part.means + means
        parts[key] = OptimizerPart(*sizes, key[1])
    return tuple(parts.values())


def total_of(
    parts: Sequence[OptimizerPart], ranks: int, stage: int, held: HeldKind = "fp32"
) -> Fraction:
    """Return the bytes that a rank holds between steps, of all parts (Figure 1, Table 1)."""
    shares = [one.shares(ranks, stage, held) for one in parts]
    return sum((size for each in shares for size in each.values()), Fraction(0))


def gradients_of(
    parts: Sequence[OptimizerPart], ranks: int, stage: int, held: HeldKind = "fp32"
) -> Fraction:
    """Return the bytes of gradients among `total_of`."""
    return sum((one.shares(ranks, stage, held)["gradient"] for one in parts), Fraction(0))


def words_of(parts: Sequence[OptimizerPart], stage: int, held: HeldKind = "fp32") -> str:
    """Return the formula of a stage, `"4 Psi + 12 Psi/N"`, for each part."""
    each = []
    for one in parts:
        term, share = words(stage, recipe(held, one.states)), "/N" if stage >= 1 else ""
        if one.means:  # they are shared out as states are
            term += f" + 4 M{share}, M = {one.means:,} means"
        each.append(term.replace("/N", f"/(N/{one.divided})" if one.divided > 1 else "/N"))
    if len(parts) == 1:
        return each[0]
    named = zip(each, parts, strict=True)
    return " + ".join(f"({one} of {part.elements:,} by {part.states})" for one, part in named)


def paper_words(parts: Sequence[OptimizerPart]) -> str:
    """Return the bytes per parameter of mixed precision: `"2 + 2 + 12"`."""
    each = [f"2 + 2 + {recipe('mixed', one.states).states}" for one in parts]
    return " or ".join(dict.fromkeys(each))
