"""The user's own model is built alike everywhere, and its batches follow from the case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from own_models import Gpt
from torch import nn

from zerocheck.adapters.shared.units import unit_modules
from zerocheck.case.schema import Case, Data, Model, Sharding, Start, UserModel
from zerocheck.contract.start import initial_state, scramble
from zerocheck.errors import UsageError
from zerocheck.models import build_model
from zerocheck.models.batches import batch, loss_of
from zerocheck.models.inspection import inspect_model
from zerocheck.models.parts import block_list, show_blocks
from zerocheck.models.user import call_with

MODELS = Path(__file__).parents[1] / "own_models.py"
replace = msgspec.structs.replace


def case_of(name: str, **fields: object) -> Case:
    return Case(model=Model(user=inspect_model(f"{MODELS}:{name}")), **fields)  # type: ignore[arg-type]


def weights(case: Case) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in build_model(case).state_dict().items()}


def test_the_seed_decides_and_nothing_else() -> None:
    case = case_of("gpt")
    torch.manual_seed(3)
    first = weights(case)
    torch.manual_seed(4)
    state = torch.get_rng_state()
    again, other = weights(case), weights(replace(case, seed=1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["wte.weight"], other["wte.weight"])


def test_parameters_that_start_at_0() -> None:
    model = build_model(case_of("gpt", start=Start(zeros=("*.bias", "wpe.*"))))
    zero = {name for name, one in model.named_parameters() if not one.any()}
    assert {"wpe.weight", "norm.bias", "layers.0.out.bias"} <= zero
    assert "wte.weight" not in zero


def test_batches_differ_by_rank_step_and_microbatch() -> None:
    case = case_of("conv", mesh=(8,))
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = [batch(case, step=s, rank=r, microbatch=m) for s, r, m in places]
    again = batch(case, step=0, rank=0, microbatch=0)
    assert torch.equal(drawn[0].inputs[0], again.inputs[0])
    firsts = [one.inputs[0].flatten()[:50] for one in drawn]
    assert all(not torch.equal(firsts[0], other) for other in firsts[1:])
    assert len({len(batch(case, step=0, rank=r, microbatch=0).inputs[0]) for r in range(8)}) > 1


@pytest.mark.parametrize("name", ["gpt", "conv"])
def test_the_loss_is_theirs_times_the_factor(name: str) -> None:
    case = case_of(name)
    model, drawn = build_model(case), batch(case, step=0, rank=0, microbatch=0)
    model.eval()
    with torch.no_grad():
        outputs = model(*drawn.inputs)
    one, four = (
        loss_of(replace(case, data=Data(loss_factor=factor)))(outputs, drawn.target)
        for factor in (1.0, 4.0)
    )
    assert one.dim() == 0 and one.dtype == torch.float32
    assert float(four) == 4 * float(one)


def test_mid_training_changes_every_element_and_keeps_sizes() -> None:
    case = case_of("odd", start=Start(step=2, moments="typical", zeros=("twice.bias",)))
    model = build_model(case)
    state = initial_state(case, model)
    assert state is not None
    for name, parameter in model.named_parameters():
        value = state[name, "parameter"]
        assert value.dtype == parameter.dtype
        if name == "twice.bias":
            assert not value.any()
        elif parameter.dtype == torch.float32:
            assert (value != parameter).all() and value.abs().max() < 2 * parameter.abs().max() + 1
    assert ("wte.weight", "exp_avg") not in state and ("gain", "exp_avg") in state


def test_other_weights_before_a_load() -> None:
    case = case_of("odd")
    model, before = build_model(case), build_model(case)
    scramble(model, case)
    for (name, one), other in zip(model.named_parameters(), before.parameters(), strict=True):
        assert (one != other).all(), name
    assert (model.mask != before.mask).all()
    case = case_of("gpt")
    model = build_model(case)
    scramble(model, case)  # positions are in no checkpoint, so no load brings them back
    assert torch.equal(model.positions, build_model(case).positions)


def test_blocks_and_experts_are_shown_to_whoever_makes_units() -> None:
    gpt, conv, moe = (build_model(case_of(name)) for name in ("gpt", "conv", "moe"))
    assert list(gpt.blocks) == list(gpt.layers)
    assert list(conv.blocks) == [conv.features, conv.head]
    assert list(moe.blocks) == [moe.stem, moe.router, moe.head]
    assert moe.experts[0].no_unit and not hasattr(moe.stem, "no_unit")
    assert [name for name, _ in gpt.named_parameters()] == [n for n, _ in Gpt().named_parameters()]
    assert block_list(moe) is None


def test_a_module_whose_weight_is_used_elsewhere_is_no_unit() -> None:
    model = build_model(case_of("bypassing"))
    wraps = {wrap: unit_modules(model, Sharding(wrap=wrap)) for wrap in ("layer", "block", "size")}
    assert wraps == {
        "layer": [model.wte, model.blocks[1][0]],
        "block": [model.blocks[1]],
        "size": [],
    }


class _ByNumber(nn.Module):
    """Its blocks are in a ModuleDict, as those of torchtitan, and beside them is a small list."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(2, 2)])
        self.layers = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in range(3)})
        self.named = nn.ModuleDict({"wide": nn.Linear(40, 40)})


def test_blocks_of_a_dict_of_numbers_are_shown() -> None:
    model = _ByNumber()
    show_blocks(model)
    assert model.blocks == list(model.layers.values())


Change = Callable[[UserModel], UserModel]


def _other(**fields: object) -> Change:
    def change(user: UserModel) -> UserModel:
        first, *rest = user.parameters
        return replace(user, parameters=(replace(first, **fields), *rest))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other(name="wtf.weight"), "only the case has the parameter wtf.weight"),
        (_other(shape=(5, 8)), r"wte.weight has shape \(20, 8\), in the case it is \(5, 8\)"),
        (_other(dtype="bf16"), "wte.weight has dtype fp32, in the case it is bf16"),
        (_other(trains=False), "wte.weight has trains True, in the case it is False"),
        (lambda user: replace(user, parameters=user.parameters[:-1]), "only the model has"),
        (lambda user: replace(user, parameters=user.parameters[::-1]), "another order"),
    ],
)
def test_another_model_than_that_of_the_case_is_refused(change: Change, message: str) -> None:
    user = inspect_model(f"{MODELS}:gpt")
    with pytest.raises(UsageError, match=message):
        build_model(Case(model=Model(user=change(user))))


def test_a_batch_that_is_a_dict_gives_keywords_and_the_loss_is_found() -> None:
    case = case_of("named")
    drawn = batch(case, step=0, rank=0, microbatch=0)
    assert drawn.keywords == ("labels", "inputs")
    outputs = call_with(build_model(case), drawn.inputs, drawn.keywords)
    loss = loss_of(case)(outputs, drawn.target)
    assert loss.dim() == 0 and torch.equal(loss, outputs.loss)
