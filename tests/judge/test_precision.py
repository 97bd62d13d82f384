"""The path of a gradient through several formats: what is counted, and what it encloses."""

from __future__ import annotations

import math

import pytest
import torch
from small import SIZE, layout

from zerocheck.case.schema import Case, Training
from zerocheck.contract.semantics import Semantics
from zerocheck.errors import UsageError
from zerocheck.floating_point import BF16, FP32, Enclosure, Format
from zerocheck.judge import bounds
from zerocheck.judge.compare import compare
from zerocheck.judge.expected import expected
from zerocheck.judge.layout import Formats
from zerocheck.judge.local import Passes
from zerocheck.judge.precision import Computing, Path, path_of
from zerocheck_reference import half_ulp

FP16 = Format.of(torch.float16)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASE = Case(mesh=(3,), training=Training(microbatches=4))


def _semantics(local: str, summed: str, reduce: str, **more: str) -> Semantics:
    compute = {} if local == "fp32" else {"compute": local}
    return Semantics(accumulate_dtype=summed, reduce=reduce, **compute, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("semantics", "path"),
    [
        # 3 additions of microbatches; 2 of ranks and a division by 3, which is 2.
        (_semantics("bf16", "fp32", "fp32"), ((3, FP32), (4, FP32))),
        (_semantics("bf16", "own", "own"), ((3, BF16), (4, BF16))),
        (_semantics("bf16", "own", "fp32"), ((3, BF16), (4, FP32))),
        (_semantics("bf16", "fp32", "bf16"), ((3, FP32), (4 + 1, BF16))),
        (_semantics("fp32", "bf16", "bf16"), ((3 + 1, BF16), (4, BF16))),
        (_semantics("fp32", "fp32", "bf16"), ((3, FP32), (4 + 1, BF16))),
        (_semantics("bf16", "bf16", "bf16", average="sum"), ((3, BF16), (2, BF16))),
        (_semantics("bf16", "bf16", "bf16", divide="gradient"), ((3, BF16), (4, BF16))),
        (_semantics("bf16", "fp32", "fp32", divide_ranks="loss"), ((3, FP32), (2, FP32))),
        # Reduced first, then cast and summed.
        (_semantics("bf16", "fp32", "bf16", accumulate="reduce_each"), ((4, BF16), (3, FP32))),
        # Divided in the format of local gradients, and cast, before the reduction.
        (
            _semantics("bf16", "fp32", "fp32", accumulate="reduce_each", divide_ranks="own"),
            ((2, BF16), (2, FP32), (3, FP32)),
        ),
        (
            _semantics("bf16", "fp32", "fp32", divide_ranks="own", average="sum"),
            ((3, FP32), (2, FP32)),
        ),
        # All that was reduced is cast and reduced again, with each of 4 microbatches.
        (
            _semantics("fp32", "fp32", "bf16", accumulate="reduce_again"),
            ((3, FP32), (4 * (4 + 2), BF16)),
        ),
        # Under autocast local gradients are in the parameters' dtype.
        (Semantics(compute="bf16", precision_mode="autocast"), ((3, FP32), (4, FP32))),
    ],
)
def test_roundings(semantics: Semantics, path: Path) -> None:
    assert path_of(CASE, semantics, microbatches=4) == path


def test_without_microbatches_and_ranks_there_is_one_cast() -> None:
    case = Case(mesh=(1,))
    assert path_of(case, _semantics("bf16", "own", "fp32"), microbatches=1) == ()
    assert path_of(case, _semantics("fp32", "bf16", "bf16"), microbatches=1) == ((1, BF16),)


def test_on_two_axes_each_reduction_counts_once() -> None:
    case = Case(mesh=(2, 3), training=Training(microbatches=2))
    semantics = _semantics("bf16", "bf16", "bf16", accumulate="reduce_shards")
    # 1 addition of microbatches; 1 + 2 of ranks, a division by 2 and one by 3.
    assert path_of(case, semantics, microbatches=2) == ((1, BF16), (3 + 2, BF16))


def test_in_fp32_alone_not_a_bit_differs_from_the_bound_of_fp32() -> None:
    exact = torch.randn(100, dtype=torch.float64)
    absolute = exact.abs() * 3
    plain = bounds.gradient(exact, absolute, 7)
    made = bounds.along(exact, absolute, ((3, FP32), (4, FP32)))
    assert torch.equal(made.bound, plain.bound) and torch.equal(made.exact, plain.exact)


def _reduced(terms: torch.Tensor, summed: str, reduce: str) -> torch.Tensor:
    """(ranks, microbatches, elements) as an implementation reduces them, in fp32."""
    ranks = []
    for rank in terms:
        total = rank[0].to(DTYPES[summed], copy=True)
        for one in rank[1:]:
            total += one.to(DTYPES[summed])
        ranks.append(total.to(DTYPES[reduce]))
    total = ranks[0].clone()
    for one in ranks[1:]:
        total += one
    return total.div_(len(ranks)).float()


def _enclosure(terms: torch.Tensor, semantics: Semantics) -> Enclosure:
    wide = terms.to(torch.float64)
    path = path_of(CASE, semantics, microbatches=4)
    return bounds.along(wide.sum((0, 1)) / 3, wide.abs().sum((0, 1)) / 3, path)


WAYS = [
    ("bf16", "fp32", "fp32"),
    ("bf16", "bf16", "bf16"),
    ("bf16", "bf16", "fp32"),
    ("bf16", "fp32", "bf16"),
    ("fp32", "bf16", "bf16"),
    ("fp32", "fp32", "bf16"),
    ("fp16", "fp16", "fp16"),
    ("fp16", "fp16", "fp32"),
]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_what_is_so_rounded_is_inside_and_the_bound_is_not_wide(way: tuple[str, str, str]) -> None:
    generator = torch.Generator().manual_seed(3)
    terms = torch.randn(3, 4, 20_000, generator=generator).to(DTYPES[way[0]])
    seen = _reduced(terms, *way[1:]).double()
    share, misfit = compare(seen, _enclosure(terms, _semantics(*way)))
    assert misfit is None
    assert share > 0.05  # sums of bf16 are mostly exact in fp32


@pytest.mark.parametrize(
    ("declared", "done"),
    [
        (("bf16", "fp32", "fp32"), ("bf16", "fp32")),
        (("bf16", "fp32", "fp32"), ("fp32", "bf16")),
        (("fp32", "fp32", "fp32"), ("fp32", "bf16")),
        (("fp16", "fp32", "fp32"), ("fp16", "fp32")),
        (("fp32", "fp16", "fp16"), ("bf16", "bf16")),
    ],
)
def test_what_is_rounded_to_less_than_was_declared_is_outside(
    declared: tuple[str, str, str], done: tuple[str, str]
) -> None:
    terms = torch.randn(3, 4, 1000, generator=torch.Generator().manual_seed(3))
    terms = terms.to(DTYPES[declared[0]])
    seen = _reduced(terms, *done).double()
    assert compare(seen, _enclosure(terms, _semantics(*declared)))[1] is not None


def test_a_scale_keeps_the_bound_of_what_would_underflow_narrow() -> None:
    exact = torch.full((4,), 1e-7, dtype=torch.float64)
    plain = bounds.along(exact, exact, ((2, FP16),)).bound
    scaled = bounds.along(exact, exact, ((2, FP16),), 65536.0).bound
    assert float(plain.max()) > 5e-8  # the smallest fp16 number is 6e-8
    assert float(scaled.max()) < 2e-10


def test_what_can_overflow_fp16_has_no_bound() -> None:
    gradients = torch.zeros(3, 4, SIZE)
    gradients[..., 0] = 6e3  # 12 of them are more than 65504
    gradients[..., 1] = 5e3
    passes = Passes(gradients, torch.ones(3, 4, 5, dtype=torch.bool), [], [])
    wanted = expected(passes, layout(), CASE, _semantics("fp16", "own", "own")).enclosure
    assert math.isinf(float(wanted.bound[0])) and bool(wanted.bound[1:].isfinite().all())


def test_a_narrow_parameter_rounds_once_more() -> None:
    gradients = torch.randn(3, 4, SIZE)
    passes = Passes(gradients, torch.ones(3, 4, 5, dtype=torch.bool), [], [])
    semantics = Semantics(accumulate_dtype="fp32", reduce="fp32")
    own = layout()
    narrow = type(own)(
        own.places, own.size, own.by_name, own.trainable, {}, Formats(((BF16, None),), own.size)
    )
    wide = expected(passes, own, CASE, semantics).enclosure.bound
    cast = expected(passes, narrow, CASE, semantics).enclosure
    assert bool((cast.bound >= half_ulp(cast.exact, torch.bfloat16)).all())
    assert bool((cast.bound > wide).all())


def test_computing() -> None:
    assert Computing.of(Semantics()) == Computing()
    cast = Computing.of(Semantics(compute="bf16", inputs="cast"))
    assert cast.cast == torch.bfloat16 and cast.inputs and not cast.autocast
    assert Computing.of(Semantics(compute="fp16", precision_mode="autocast")).cast is None
    both = Computing.of(Semantics(compute="bf16", precision_mode="cast_and_autocast"))
    assert both.cast == torch.bfloat16 and both.autocast and not both.outputs
    assert Computing.of(Semantics(compute="bf16", outputs="cast")).outputs


@pytest.mark.parametrize(
    "field", ["compute", "precision_mode", "inputs", "accumulate_dtype", "reduce", "master"]
)
def test_an_unknown_word_is_refused(field: str) -> None:
    with pytest.raises(UsageError, match=rf"Semantics\.{field}.*'bf15'"):
        Semantics(**{field: "bf15"})  # type: ignore[arg-type]
