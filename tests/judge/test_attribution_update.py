"""A wrong update is explained by a change of the optimizer's step, and its cause is of that."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
import torch
from small import layout
from test_case import CASE

from zerocheck.case.schema import Case, Group, Optimizer
from zerocheck.faults.registry import NAMED_FAULTS
from zerocheck.judge.diagnose.update import fitting, in_words
from zerocheck.judge.recipe import UpdateRecipe
from zerocheck.optimizers.specification import Segment, UpdateElements

GROUPS = (
    Group(pattern="*.bias", lr=0.01, weight_decay=0.0, eps=1e-6, beta1=0.8),
    Group(pattern="*", lr=0.02, weight_decay=0.1, eps=1e-5),
)
ADAMW = msgspec.structs.replace(
    CASE,
    optimizer=msgspec.structs.replace(CASE.optimizer, groups=GROUPS, schedule="cosine"),
    training=msgspec.structs.replace(CASE.training, clip=None),
)
SGD = msgspec.structs.replace(
    ADAMW,
    optimizer=Optimizer(
        kind="sgd",
        momentum=0.9,
        groups=tuple(msgspec.structs.replace(one, beta1=0.9) for one in GROUPS),
    ),
)
NESTEROV = msgspec.structs.replace(
    SGD, optimizer=msgspec.structs.replace(SGD.optimizer, nesterov=True)
)

PLANTED = [
    ("l2-instead-of-decoupled", ADAMW, "exp_avg of .*with weight decay added to the gradient"),
    ("decay-twice", ADAMW, "parameter of .*with weight decay (twice|before the update and after)"),
    ("decay-missing", ADAMW, "without weight decay"),
    ("decay-by-step-size", ADAMW, "with weight decay times lr / correction1"),
    ("decay-on-excluded", ADAMW, r"with weight_decay of another group \('\*'\)"),
    ("eps-in-root", ADAMW, "with eps inside of the root"),
    ("betas-swapped", ADAMW, "with beta1 and beta2 exchanged"),
    ("moments-reset", ADAMW, "with states of 0"),
    ("stale-moments", ADAMW, "with exp_avg and exp_avg_sq from before this step"),
    ("bias-correction-off-by-one", ADAMW, "with bias corrections of the (next step|step before)"),
    ("state-in-bf16", ADAMW, "rounded to bf16"),
    ("dampening", SGD, "with the gradient times 1 - momentum"),
    ("momentum-ignored", SGD, "along the gradient, and not along the momentum buffer"),
    ("nesterov-unasked", SGD, "in Nesterov's form, which is not asked for"),
    ("nesterov-dropped", NESTEROV, "in the form of plain momentum, not Nesterov's"),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("fault", "case", "words"), PLANTED)
def test_a_change_explains_a_planted_fault(
    observe: Callable, fault: str, case: Case, words: str
) -> None:
    planted = NAMED_FAULTS[fault]
    violations = observe(planted.where, case).judge().violations
    violation = next(one for one in violations if one.obligation == "update")
    every = (violation, *violation.parts)
    assert any(re.search(words, one.attribution) for one in every), violation.attribution
    assert set(planted.causes) & {cause for one in every for cause in one.causes}


def _segment(observed: torch.Tensor, old: torch.Tensor, gradient: torch.Tensor) -> Segment:
    case = Case(optimizer=Optimizer(groups=GROUPS))
    recipe = UpdateRecipe.of(case)
    zero = torch.zeros_like(old)
    elements = UpdateElements(
        zero,
        gradient,
        {"exp_avg": old, "exp_avg_sq": old.abs()},
        {"exp_avg": observed, "exp_avg_sq": old.abs()},
    )
    return Segment(
        role="exp_avg",
        observed=observed,
        elements=elements,
        options=recipe.options,
        group=GROUPS[0],
        lr=0.01,
        step=3,
        reading="double",
        rates=[0.01],
        others=[(GROUPS[1], 0.02)],
    )


def test_a_right_moment_needs_no_change_and_one_element_refutes_one() -> None:
    generator = torch.Generator().manual_seed(3)
    old, gradient = torch.randn(2, layout().size, dtype=torch.float64, generator=generator)
    (optimizer,) = UpdateRecipe.of(Case(optimizer=Optimizer(groups=GROUPS))).optimizer.rules
    right = (0.8 * old + 0.2 * gradient).float().double()
    assert fitting(optimizer, [_segment(right, old, gradient)]) == ()
    wrong = (0.8 * old - 0.2 * gradient).float().double()
    (change,) = fitting(optimizer, [_segment(wrong, old, gradient)])
    assert change.words == "with the gradient of the other sign in place of the gradient"
    wrong[3] *= 1 + 1e-4
    assert fitting(optimizer, [_segment(wrong, old, gradient)]) == ()


def test_changes_that_a_case_cannot_part_are_all_said() -> None:
    old = torch.linspace(0.1, 1.0, 8, dtype=torch.float64)
    (optimizer,) = UpdateRecipe.of(Case(optimizer=Optimizer(groups=GROUPS))).optimizer.rules
    gradient = torch.full_like(old, 0.5)
    segment = _segment((0.8 * old - 0.1).float().double(), old, gradient)
    found = fitting(optimizer, [segment._replace(unclipped=-gradient, previous=-gradient)])
    assert len(found) == 3 and in_words(found).count(", or ") == 2
