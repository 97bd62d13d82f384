"""A `build` function that cannot be judged is refused before the first case, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerocheck.errors import UsageError
from zerocheck.ranks.pool import Pool
from zerocheck.run.engine import run
from zerocheck.run.plan.options import RunOptions

SUBJECTS = Path(__file__).parents[2] / "judge" / "built_subjects.py"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("momentum", "is SGD, and the cases of this run have AdamW: check it with --optimizer sgd"),
        ("unnamed", "whose state has 'count', 'state1', 'state2', and no exp_avg or exp_avg_sq"),
        ("sign", "Built.optimizer is Sign, which is not AdamW: alone, on one tensor"),
        ("own_options", "the optimizer has options of its own and not those of the case"),
        ("nothing", "Built.optimizer is of type object, which has no step()"),
        ("unbuilt", "build must return zerocheck.Built(model, optimizer), got NoneType"),
    ],
)
def test_it_is_refused(session_pool: Pool, tmp_path: Path, name: str, words: str) -> None:
    options = RunOptions(
        implementations=(f"{SUBJECTS}:{name}",),
        world_sizes=(2,),
        max_cases=4,
        report_dir=str(tmp_path),
    )
    with pytest.raises(UsageError) as raised:
        run(options, (), ranks=session_pool)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
