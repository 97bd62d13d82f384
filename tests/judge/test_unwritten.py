"""NaN is called memory that was never written only where that is filled with NaN."""

from __future__ import annotations

import math

import pytest
import torch

from zerocheck import causes as bugs
from zerocheck.judge.diagnose.publish import causes
from zerocheck.judge.diagnose.unwritten import memory_of_a_job, unwritten


def test_in_a_case_and_in_a_job() -> None:
    of_case = unwritten("it holds NaN")
    assert "never written" in of_case.text and of_case.causes == (bugs.UNINITIALISED_MEMORY,)
    with memory_of_a_job():
        of_job = unwritten("it holds NaN")
    assert of_job.text == "it holds NaN, where a finite value is right" and of_job.causes == ()
    assert unwritten("it").causes


@pytest.mark.parametrize("filled", [True, False])
def test_a_copy(filled: bool) -> None:
    copy, owned = torch.tensor([math.nan]), torch.tensor([1.0])
    if filled:
        assert causes(copy, owned, None) == (bugs.UNINITIALISED_MEMORY,)
        return
    with memory_of_a_job():
        assert causes(copy, owned, None) == (bugs.COPIES_DIFFER,)
