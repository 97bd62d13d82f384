"""A wrong gradient is explained without a list of bugs, and one element refutes it."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
import torch
from slices import sliced
from test_case import CASE
from test_diagnose import USED_BY_SOME

from zerocheck.case.schema import Block, Case, Model
from zerocheck.judge.attribution.mixtures import GradientSource, _bits, _spread
from zerocheck.judge.compare import exactly
from zerocheck.judge.diagnose.named import without_names
from zerocheck.protocol.verdicts import Violation

UNCLIPPED = msgspec.structs.replace(
    CASE, training=msgspec.structs.replace(CASE.training, clip=None)
)
TIED = msgspec.structs.replace(
    UNCLIPPED, model=Model(stem="embedding", inputs=8, outputs=8, width=4, tied=True)
)
TWICE = msgspec.structs.replace(
    UNCLIPPED,
    model=msgspec.structs.replace(CASE.model, blocks=(Block(kind="mlp", hidden=7),), calls=(0, 0)),
)
ALONE = msgspec.structs.replace(UNCLIPPED, mesh=(1,))
FIVE_IN_BITS = msgspec.structs.replace(
    UNCLIPPED,
    mesh=(5,),
    model=Model(inputs=4, width=4, outputs=2),
    training=msgspec.structs.replace(UNCLIPPED.training, microbatches=4),
)
PLAIN_DDP = msgspec.structs.replace(UNCLIPPED, model=Model(inputs=3, width=4, outputs=2))

PLANTED = [
    (
        "zero2+average-becomes-sum",
        CASE,
        r"^gradient of every trained tensor: every local .* \(W = 3",
    ),
    ("zero2+double-average", CASE, r"every local gradient counts \S+ times \(1/W"),
    ("zero2+rank-counted-twice", CASE, r"the local gradient of rank \d counts 2 times"),
    ("zero2+rank-left-out", CASE, r"the local gradient of rank \d counts 0 times"),
    ("zero2+half-group", CASE, r"reduced apart"),
    ("zero2+reduced-in-bf16", CASE, r"rounded to bf16 before they were reduced"),
    ("zero2+result-rounded", CASE, r"over ranks of each microbatch was rounded to bf16"),
    ("precision:ReducedIntoBf16", CASE, r"of each microbatch was .*, and so was each sum"),
    ("zero2+neighbours-shard", CASE, r"holds the shard that"),
    ("zero2+reduction-stale", UNCLIPPED, r"it is the gradient of the step before"),
    ("gradient:ShardOffByOne", CASE, r"elements stand 1 place earlier in the flat vector"),
    ("gradient:TailTakenForPadding", USED_BY_SOME, r"\] is 0"),
    ("accumulation:LastMicrobatchOnly", CASE, r"only microbatch 1 \(the last of 2\) is in it"),
    ("accumulation:NeverZeroed", CASE, r"the right gradient plus the gradient of the step before"),
    ("accumulation:NeverZeroed", ALONE, r"the right gradient plus the gradient of the step before"),
    ("zero2+half-group", FIVE_IN_BITS, r"ranks 0 to 2 and ranks 3 and 4 are reduced apart"),
    ("ddp+reduction-stale", PLAIN_DDP, r"holds \S+ .*of the gradient of the step before"),
    ("omissions:TiedBeforeSync", TIED, r"of its use \d of 2 \(in \w+\), .*own gradient alone"),
    ("omissions:ReusedModuleOverwrites", TWICE, r"of its use 2 of 2 \(in blocks.0.up\), it is 0"),
]


def _gradient(observed: object) -> Violation | None:
    with without_names():
        violations = observed.judge().violations  # type: ignore[attr-defined]
    return next((one for one in violations if one.obligation == "gradient"), None)


@pytest.mark.parametrize(("fault", "case", "words"), sliced(PLANTED, PLANTED[::8]))
def test_one_element_refutes_an_attribution(
    observe: Callable, fault: str, case: Case, words: str
) -> None:
    observed = observe(fault if "+" in fault else f"zerocheck.faults.{fault}", case)
    first = _gradient(observed)
    assert first is not None and not first.causes
    assert re.search(words, first.attribution), first.attribution
    _, data = observed.places("gradient", "reduced", first.step, first.tensors[0])[0]
    at = int(data.abs().argmax())
    kept = float(data[at])
    data[at] = kept * (1 + 1e-3) if kept else 1e-3
    changed = _gradient(observed)
    assert changed is not None and changed.attribution != first.attribution
    data[at] = kept
    again = _gradient(observed)
    assert again is not None and again.attribution == first.attribution


def test_evidence_of_values_that_are_all_0() -> None:
    """Their own size says nothing; that of the right values does: 24 bits each."""
    zeros = torch.zeros(3, dtype=torch.float64)
    source = GradientSource("0", exactly(zeros))
    spread = _spread(zeros, torch.tensor([0.5, -2.0, float("inf")]))
    assert spread == 2.0
    assert _bits(source, spread, 0, 3) == 72.0
    assert _spread(zeros, zeros[:0]) > 0
