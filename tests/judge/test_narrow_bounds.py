"""The bounds of bf16 enclose what torch's kernels do, are nearly attained, and are no wider than
what they must enclose: what rounds more often, or in another place, is outside."""

from __future__ import annotations

import math
import random

import pytest
import torch

from zerocheck.floating_point import BF16, FP32, Enclosure, Format
from zerocheck.judge import bounds
from zerocheck.judge.compare import compare
from zerocheck.judge.layout import Formats
from zerocheck.optimizers.adamw import bounds as adamw
from zerocheck_reference import half_ulp

SIZE = 1024
TRIALS = 600
FORMS = ("for-loop", "foreach", "fused", "multiply-add", "capturable")
KERNELS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def _normal(generator: torch.Generator, scale: float, size: int = SIZE) -> torch.Tensor:
    return (torch.empty(size).normal_(generator=generator) * scale).bfloat16()


def _share(observed: torch.Tensor, enclosure: Enclosure) -> float:
    share, misfit = compare(observed.double(), enclosure)
    assert misfit is None, f"outside by {share}"
    return share


def _written_out(
    form: str, p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], o: dict
) -> None:
    """AdamW as torch wrote it before it took lerp, or as it writes it for CUDA graphs."""
    (b1, b2), step = o["betas"], float(state["step"]) + 1
    m, v = state["exp_avg"], state["exp_avg_sq"]
    if o["weight_decay"]:
        p.mul_(1 - o["lr"] * o["weight_decay"])
    m.mul_(b1).add_(g, alpha=1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    if o["amsgrad"]:
        v = torch.maximum(state["max_exp_avg_sq"], v, out=state["max_exp_avg_sq"])
    size = o["lr"] / (1 - b1**step)
    denominator = (v.sqrt() / (1 - b2**step) ** 0.5).add_(o["eps"])
    if form == "capturable":
        p.addcdiv_(m, denominator.div_(-size))
    else:
        p.addcdiv_(m, denominator, value=-size)


@pytest.fixture(scope="module")
def shares() -> dict[tuple[str, str], float]:
    """The largest share of each bound, by form of AdamW and role, over random options."""
    found: dict[tuple[str, str], float] = {}
    choose, generator = random.Random(0), torch.Generator().manual_seed(0)
    for trial in range(TRIALS):
        form = FORMS[trial % len(FORMS)]
        options = {
            "lr": 10 ** choose.uniform(-6, 0),
            "betas": (
                choose.choice((0.0, 0.5, 0.9, 0.99, 0.999999)),
                choose.choice((0.0, 0.9, 0.95, 0.999, 0.9999)),
            ),
            "eps": choose.choice((1e-8, 1e-6, 1e-3)),
            "weight_decay": choose.choice((0.0, 0.01, 0.5)),
            "amsgrad": choose.random() < 0.3,
        }
        step = choose.choice((1, 2, 256, 10_001))
        scale = 10 ** choose.uniform(-20, 8) if choose.random() < 0.5 else 1.0
        g = _normal(generator, scale)
        p = _normal(generator, choose.choice((0.0, 1e-3, 1.0)))
        m = _normal(generator, scale * choose.choice((0.1, 1.0, 10.0)) * (step > 1))
        v = (m.float() * 0.7).square().bfloat16()
        largest = (v.float() * torch.empty(SIZE).uniform_(1, 2, generator=generator)).bfloat16()
        q = p.clone().requires_grad_()
        state = {
            "step": torch.tensor(float(step - 1)),
            "exp_avg": m.clone(),
            "exp_avg_sq": v.clone(),
            "max_exp_avg_sq": largest.clone(),
        }
        if form in KERNELS:
            q.grad = g.clone()
            optimizer = torch.optim.AdamW([q], **options, **KERNELS[form])
            optimizer.state[q] = state
            optimizer.step()
        else:
            with torch.no_grad():
                _written_out(form, q, g, state, options)
        s = adamw.scalars(
            lr=options["lr"],
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            step=step,
            reading="double",
        )
        if options["amsgrad"]:
            assert torch.equal(state["max_exp_avg_sq"], torch.maximum(largest, state["exp_avg_sq"]))
        of = state["max_exp_avg_sq" if options["amsgrad"] else "exp_avg_sq"].double()
        wide = [t.double() for t in (p, g, m, v)]
        seen = {
            "exp_avg": (state["exp_avg"], adamw.exp_avg(wide[2], wide[1], s, format=BF16)),
            "exp_avg_sq": (
                state["exp_avg_sq"],
                adamw.exp_avg_sq(wide[3], wide[1], s, format=BF16),
            ),
            "parameter": (
                q.detach(),
                adamw.parameter(wide[0], state["exp_avg"].double(), of, s, BF16),
            ),
        }
        for role, (observed, enclosure) in seen.items():
            key = form, role
            found[key] = max(found.get(key, 0.0), _share(observed, enclosure))
    return found


def test_update_bounds_enclose_every_form_of_adamw(
    shares: dict[tuple[str, str], float], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print("\nlargest share of each bf16 bound:", {k: round(v, 3) for k, v in shares.items()})
    assert all(share <= 1.0 for share in shares.values())


@pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq", "parameter"])
def test_update_bounds_are_attained_by_some_form(
    shares: dict[tuple[str, str], float], role: str
) -> None:
    assert max(share for (_, of), share in shares.items() if of == role) > 0.9


def test_a_factor_that_foreach_reads_in_bf16_is_inside() -> None:
    # torch's _foreach_mul_ rounds its scalar to the dtype of the tensors: 0.999 is 1 there.
    v = torch.full((8,), 2.0).bfloat16()
    moved = [v.clone()]
    torch._foreach_mul_(moved, 0.999)
    assert torch.equal(moved[0], v)


@pytest.mark.parametrize("terms", [2, 3, 5, 16, 300])
@pytest.mark.parametrize("order", ["rank", "tree", "wide"])
def test_gradient_bound_encloses_every_order_of_summation(terms: int, order: str) -> None:
    parts = _normal(torch.Generator().manual_seed(terms), 1.0, terms * SIZE).view(terms, SIZE)
    wide = parts.double()
    enclosure = bounds.gradient(
        wide.sum(0) / terms,
        wide.abs().sum(0) / terms,
        bounds.gradient_roundings(
            world_size=terms, microbatches=1, average="mean", divide="loss", accumulate="local"
        ),
        BF16,
    )
    rows = list(parts.float() if order == "wide" else parts)
    while len(rows) > 1:
        if order == "tree":
            rows = [sum(rows[i : i + 2][1:], rows[i]) for i in range(0, len(rows), 2)]
        else:
            rows = [rows[0] + rows[1], *rows[2:]]
    assert _share((rows[0] / terms).bfloat16(), enclosure) <= 1.0
    early = [part * (1 / terms) for part in parts]  # divided before the sum, as DDP does
    assert _share(sum(early[1:], early[0]), enclosure) <= 1.0


def test_gradient_bound_of_two_ranks_is_attained() -> None:
    wide = _normal(torch.Generator().manual_seed(0), 1.0, 2 << 14).view(2, -1)
    exact, absolute = wide.double().sum(0) / 2, wide.double().abs().sum(0) / 2
    enclosure = bounds.gradient(exact, absolute, 1, BF16)
    assert _share((wide[0] + wide[1]) / 2, enclosure) > 0.99
    assert float(bounds.gradient(exact, absolute, 0, BF16).bound.max()) == 0.0
    # As tight as the spacing allows: one more unit in the last place is outside.
    off = ((wide[0] + wide[1]) / 2).double()
    off += 2.1 * half_ulp(off, torch.bfloat16)
    assert float(((off - exact).abs() > enclosure.bound).double().mean()) > 0.99


@pytest.mark.parametrize("narrow", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_norm_bound_encloses_torch_and_a_norm_that_is_reduced_in_bf16(
    world_size: int, narrow: float
) -> None:
    generator = torch.Generator().manual_seed(world_size)
    halves = [_normal(generator, math.sqrt(narrow), 999), _normal(generator, 1.0, 999).float()]
    halves[1] *= math.sqrt(1 - narrow)
    squares = [float(half.double().square().sum()) for half in halves]
    exact, share = math.sqrt(sum(squares)), squares[0] / sum(squares)
    given = halves if narrow < 1.0 else halves[:1]
    whole = float(torch.nn.utils.get_total_norm(given))
    local = [torch.linalg.vector_norm(part) ** 2 for part in halves[0].chunk(world_size)]
    reduced = [sum(local[1:], local[0]) ** 0.5, torch.linalg.vector_norm(halves[1])]
    split = float(torch.linalg.vector_norm(torch.stack(reduced[: len(given)])))
    bound = bounds.narrow_norm_relative(1998, share, world_size, BF16) * exact
    assert abs(whole - exact) <= bound and abs(split - exact) <= bound


def test_a_norm_that_is_accumulated_in_bf16_is_outside() -> None:
    g = _normal(torch.Generator().manual_seed(1), 1.0, 1000)
    serial = g.new_zeros(())
    for x in g:
        serial += x * x
    exact = float(torch.linalg.vector_norm(g.double()))
    bound = bounds.narrow_norm_relative(1000, 1.0, 1, BF16) * exact
    assert abs(float(serial.sqrt()) - exact) > 3 * bound
    assert abs(float(torch.linalg.vector_norm(g)) - exact) <= bound


@pytest.mark.parametrize("norm", [0.3, 1.01, 7.5, 3e4])
def test_clip_bound_encloses_torch_and_sees_a_few_units(norm: float) -> None:
    g = _normal(torch.Generator().manual_seed(2), 1.0)
    for dtype in (torch.float32, torch.bfloat16):
        only = dtype == torch.bfloat16
        reported = torch.tensor(norm, dtype=dtype)
        coefficient = torch.clamp(1.0 / (reported + 1e-6), max=1.0)
        exact = min(1.0, 1.0 / (float(reported) + 1e-6))
        enclosure = bounds.clipped(g.double(), exact, BF16, all_narrow=only)
        assert _share(g.clone().mul_(coefficient), enclosure) <= 1.0
        assert _share(g.clone().mul_(coefficient.bfloat16()), enclosure) <= 1.0
        off = g.clone().mul_(float(coefficient) * (1 + 10 * BF16.u))
        assert compare(off.double(), enclosure)[1] is not None


def test_formats_put_enclosures_together_and_can_be_cut() -> None:
    narrow, wide = torch.tensor([1, 3]), torch.tensor([0, 2, 4])
    formats = Formats(((FP32, wide), (BF16, narrow)), 5)
    x = torch.arange(5.0).double() + 1

    def one_u(x: torch.Tensor, format: Format) -> Enclosure:
        return Enclosure(x, format.u * x)

    exact, bound = formats.enclose(one_u, x)
    assert torch.equal(exact, x)
    assert (bound / x).tolist() == [FP32.u, BF16.u, FP32.u, BF16.u, FP32.u]
    cut = formats.at(torch.tensor([3, 0, 1]))
    assert (cut.enclose(one_u, x[:3]).bound / x[:3]).tolist() == [BF16.u, FP32.u, BF16.u]
    assert formats.at(narrow).parts == ((BF16, None),)
    assert formats.narrow == BF16 and formats.at(wide).narrow is None
