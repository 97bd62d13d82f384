"""A wrong update is explained by an edit of the optimizer's equation, without a list of bugs."""

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
from zerocheck.judge.attribution.update import edits
from zerocheck.judge.diagnose.named import without_names
from zerocheck.judge.recipe import UpdateRecipe
from zerocheck.optimizers.specification import Segment, UpdateElements
from zerocheck.protocol.verdicts import Violation

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
    ("l2-instead-of-decoupled", ADAMW, r"^exp_avg of .*the decayed parameter counts 1 - beta1"),
    ("decay-twice", ADAMW, r"^parameter of .*the parameter counts .*\(decayed twice\)"),
    ("decay-missing", ADAMW, r"the parameter counts 1 \(no weight decay\)"),
    ("decay-after-update", ADAMW, r"\(decayed after the update\)"),
    ("decay-by-step-size", ADAMW, r"the parameter counts 1 - lr / correction1 \* weight_decay"),
    ("decay-on-excluded", ADAMW, r"the parameter counts .*of another group"),
    ("eps-in-root", ADAMW, r"with eps inside of the root"),
    ("eps-before-correction", ADAMW, r"with eps before the bias correction"),
    ("betas-swapped", ADAMW, r"the old moment counts beta2, where beta1 is right"),
    ("moments-reset", ADAMW, r"the old moment counts 0, where beta1 is right"),
    ("moments-swapped", ADAMW, r"exp_avg_sq"),
    ("stale-moments", ADAMW, r"with moments from before this step"),
    ("bias-correction-off-by-one", ADAMW, r"with bias corrections of the (next step|step before)"),
    ("state-in-bf16", ADAMW, r"is the right one rounded to bf16"),
    ("momentum-forgotten", SGD, r"the old buffer counts 0, where momentum is right"),
    ("dampening", SGD, r"the gradient counts 1 - momentum, where 1 is right"),
    ("momentum-ignored", SGD, r"along the gradient, and not along the momentum buffer"),
    ("nesterov-unasked", SGD, r"in Nesterov's form, which is not asked for"),
    ("nesterov-dropped", NESTEROV, r"in the form of plain momentum, and not in Nesterov's"),
]


def _update(observed: object) -> Violation | None:
    with without_names():
        violations = observed.judge().violations  # type: ignore[attr-defined]
    return next((one for one in violations if one.obligation == "update"), None)


@pytest.mark.every(2)
@pytest.mark.parametrize(("fault", "case", "words"), PLANTED)
def test_an_edit_explains_a_planted_fault(
    observe: Callable, fault: str, case: Case, words: str
) -> None:
    violation = _update(observe(NAMED_FAULTS[fault].where, case))
    assert violation is not None and not violation.causes
    every = (violation, *violation.parts)
    assert any(re.search(words, one.attribution) for one in every), violation.attribution


def _segment(observed: torch.Tensor, old: torch.Tensor, gradient: torch.Tensor) -> Segment:
    case = Case(optimizer=Optimizer(groups=GROUPS))
    recipe = UpdateRecipe.of(case)
    (rule,) = recipe.optimizer.rules
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
        scalars=recipe.scalars(rule, 0, lr=0.01, step=3, reading="double"),
        step=3,
        rates=[0.01],
        others=[(GROUPS[1], 0.02)],
    )


def test_a_right_moment_needs_no_edit_and_one_element_refutes_one() -> None:
    generator = torch.Generator().manual_seed(3)
    old, gradient = torch.randn(2, layout().size, dtype=torch.float64, generator=generator)
    (optimizer,) = UpdateRecipe.of(Case(optimizer=Optimizer(groups=GROUPS))).optimizer.rules
    right = (0.8 * old + 0.2 * gradient).float().double()
    assert edits(optimizer, [_segment(right, old, gradient)]) == []
    wrong = (0.8 * old - 0.2 * gradient).float().double()
    (edit,) = edits(optimizer, [_segment(wrong, old, gradient)])
    assert edit.words == "the gradient counts -(1 - beta1), where 1 - beta1 is right"
    wrong[3] *= 1 + 1e-4
    assert edits(optimizer, [_segment(wrong, old, gradient)]) == []


def test_edits_that_a_case_cannot_part_are_all_said() -> None:
    """With a gradient of 0 its coefficient may be anything."""
    old = torch.linspace(0.1, 1.0, 8, dtype=torch.float64)
    (optimizer,) = UpdateRecipe.of(Case(optimizer=Optimizer(groups=GROUPS))).optimizer.rules
    wrong = (0.0 * old).float().double()
    found = edits(optimizer, [_segment(wrong, old, torch.zeros_like(old))])
    assert found[0].words == "the old moment counts 0, where beta1 is right"
    assert all(one.size == 1 for one in found)
