"""A wrong gradient whose terms were rounded to a narrower format before they were summed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .evidence import Candidate, Evidence, summed

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def candidates(evidence: Evidence) -> Iterator[Candidate]:
    """What every rank gives is rounded: each microbatch or their sum, divided before or after.

    The local gradients are known bit for bit, and so is what they are rounded to; only the sum over
    ranks is enclosed, as it is for a right gradient.
    """
    world, count = evidence.passes.gradients.shape[:2]
    local = evidence.passes.gradients
    mean = evidence.semantics.average == "mean"
    in_all = local[:, 0].clone()
    for number in range(1, count):
        in_all += local[:, number]  # one after the other, as autograd adds them
    given = [("", in_all.unsqueeze(1))]
    if count > 1:
        given.append((" of each microbatch", local))
    for name, dtype in NARROW.items():
        for words, terms in given:
            for divided in (False, True) if mean and world > 1 else (False,):
                sent = (terms / world if divided else terms).to(dtype).to(torch.float64)
                divisor = evidence.divisor / world if divided else evidence.divisor
                yield Candidate(
                    f"reduced in {name}",
                    f"the gradients{words} were rounded to {name} before they were reduced",
                    [summed(evidence, sent, divisor)],
                )
