"""What torch writes on several ranks: nothing is wrong with it, and all forms are equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from hand_made_checkpoints import STEPS

from zerocheck.checkpoint.compare import compare
from zerocheck.checkpoint.examine import examine

FORMS = [
    f"{kind}-{world_size}-{form}"
    for kind in ("fsdp2", "ddp")
    for world_size in (2, 3)
    for form in ("nested", "flat", "full.pt")
]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_wrong(written: Path, form: str) -> None:
    report = examine(written / form)
    assert not report.findings
    assert not report.unchecked
    (described,) = report.checkpoints
    assert described.steps == {str(STEPS): 8}
    assert {role.role: role.tensors for role in described.roles} == {
        "model": 13, "exp_avg": 8, "exp_avg_sq": 8, "max_exp_avg_sq": 3, "step": 8,
    }  # fmt: skip
    assert {len(group.parameters): group.settings["lr"] for group in described.groups} == {
        3: "0.01",
        5: "0.003",
    }


@pytest.mark.parametrize("form", FORMS[1:])
def test_all_forms_are_equal(written: Path, form: str) -> None:
    report = compare(written / FORMS[0], written / form)
    assert not report.findings
    assert not report.unchecked
