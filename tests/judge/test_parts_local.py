"""How the reference is made to run as a rank did: threads, mode, places of parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import held, layout

from zerocheck.case.schema import Block, Case, Model, Start, Training
from zerocheck.contract.semantics import Semantics
from zerocheck.contract.start import initial_state
from zerocheck.floating_point import FP32, Format
from zerocheck.judge.layout import ParameterLayout
from zerocheck.judge.local import LocalRunner, _put, as_on_a_rank
from zerocheck.judge.precision import Computing, formats_of
from zerocheck.judge.state import StartState, State, _by_owner, _per_rank
from zerocheck.models.batches import batch
from zerocheck.models.network import build_model
from zerocheck.protocol.observations import StepObservation


def test_one_thread_and_deterministic_kernels() -> None:
    torch.set_num_threads(2)
    with as_on_a_rank():
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()


def _runner() -> tuple[LocalRunner, torch.nn.Module]:
    model = Model(inputs=3, width=4, outputs=2, blocks=(Block(kind="mlp", hidden=5),))
    case = Case(mesh=(2,), model=model)
    module = build_model(case)
    return LocalRunner(module, case, ParameterLayout.of(module, case)), module


def test_evaluation_ends() -> None:
    runner, module = _runner()
    with runner.evaluating():
        assert not module.training
    assert module.training


def test_parameters_are_put_where_they_were() -> None:
    runner, module = _runner()
    weight, bias = module.get_parameter("head.weight"), module.get_parameter("head.bias")
    values = weight.detach().clone()
    seen = StepObservation(
        losses=(), misaligned={"head.weight": 20}, strides={"head.weight": (1, 2)}
    )
    runner._place(seen)
    assert weight.data_ptr() % 64 == 20 and weight.stride() == (1, 2)
    assert torch.equal(weight, values) and bias.data_ptr() % 64 == 0
    where = weight.data_ptr()
    more = StepObservation(
        losses=(), misaligned={"head.weight": 20, "head.bias": 4}, strides=seen.strides
    )
    runner._place(more)
    assert weight.data_ptr() == where, "it stays"
    assert bias.data_ptr() % 64 == 4
    runner._place(StepObservation(losses=()))
    assert weight.data_ptr() % 64 == bias.data_ptr() % 64 == 0
    assert weight.is_contiguous() and torch.equal(weight, values)


def _normed() -> tuple[LocalRunner, list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Two ranks of a model with running statistics, and two microbatches."""
    model = Model(inputs=3, width=4, outputs=2, blocks=(Block(kind="batch_norm"),))
    case = Case(mesh=(2,), model=model, training=Training(microbatches=2))
    module = build_model(case)
    layout = ParameterLayout.of(module, case)
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    buffers = [{name: one.clone() for name, one in layout.buffers.items()} for _ in range(2)]
    for name, one in buffers[1].items():
        if name.endswith("num_batches_tracked"):
            one += 10
    return LocalRunner(module, case, layout), [flat, flat], buffers


@pytest.mark.parametrize(("sent", "counts"), [(False, [2, 12]), (True, [2, 2])])
def test_buffers_that_are_sent_before_every_forward(sent: bool, counts: list[int]) -> None:
    runner, parameters, buffers = _normed()
    seen = [StepObservation(losses=())] * 2
    passes = runner.run(0, parameters, buffers, seen, loss_divisor=2.0, sent_each=sent)
    name = "blocks.0.norm.num_batches_tracked"
    assert [int(rank[name]) for rank in passes.buffers] == counts
    assert [len(losses) for losses in passes.losses] == [2, 2]


def test_gradients_of_scaled_losses_are_divided_in_float64() -> None:
    runner, parameters, buffers = _normed()
    seen = [StepObservation(losses=())] * 2
    plain = runner.run(0, parameters, buffers, seen, loss_divisor=2.0).gradients
    assert plain.dtype == torch.float32 and bool(plain.any())
    scaled = runner.run(
        0, parameters, buffers, seen, loss_divisor=2.0, scales=(1024.0, 4.0)
    ).gradients
    assert scaled.dtype == torch.float64 and torch.equal(scaled, plain.double())
    ones = runner.run(0, parameters, buffers, seen, loss_divisor=2.0, scales=(1.0, 1.0))
    assert torch.equal(ones.gradients, plain)


def test_gradients_of_divided_losses_are_multiplied_in_float64() -> None:
    runner, parameters, buffers = _normed()
    seen = [StepObservation(losses=())] * 2
    divided = runner.run(0, parameters, buffers, seen, loss_divisor=6.0).gradients
    assert divided.dtype == torch.float32 and bool(divided.any())
    whole = runner.run(0, parameters, buffers, seen, loss_divisor=6.0, ranks=3).gradients
    assert whole.dtype == torch.float64 and torch.equal(whole, 3 * divided.double())


@pytest.mark.parametrize("cast", [False, True])
def test_outputs_are_cast_where_that_is_declared(cast: bool) -> None:
    case = Case(mesh=(2,), model=Model(inputs=3, width=4, outputs=2))
    module = build_model(case)
    computing = Computing(torch.bfloat16, parameters=False, outputs=cast)
    runner = LocalRunner(module, case, ParameterLayout.of(module, case), computing=computing)
    outputs = runner._outputs(module, batch(case, step=0, rank=0, microbatch=0))
    assert outputs.dtype == (torch.bfloat16 if cast else torch.float32)


@pytest.mark.parametrize(
    ("words", "wide"),
    [
        ({}, {}),
        ({"gradient_dtype": "kernel"}, {"norm": [0, 1, 2], "up": [0], "down": [0]}),
        ({"gradient_dtype": "kernel", "accumulate": "reduce_each"}, {"norm": [0, 1, 2]}),
    ],
)
def test_gradients_come_in_the_dtype_that_is_declared(
    words: dict[str, Any], wide: dict[str, list[int]]
) -> None:
    """Of layers that are used twice, and of a norm, whose kernel gives fp32."""
    blocks = (Block(kind="mlp", hidden=5, bias=False), Block(kind="rms_norm"))
    model = Model(inputs=3, width=4, outputs=2, blocks=blocks, calls=(0, 0, 1))
    case = Case(mesh=(1,), model=model, training=Training(microbatches=3))
    module = build_model(case)
    layout = ParameterLayout.of(module, case)
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    semantics = Semantics(compute="bf16", inputs="cast", **words)
    assert formats_of(semantics)[0] == (FP32 if wide else Format.of(torch.bfloat16))
    runner = LocalRunner(module, case, layout, computing=Computing.of(semantics))
    for _ in range(2):  # what is allowed in the last is not left over
        passes = runner.run(0, [flat], [{}], [StepObservation(losses=())], loss_divisor=3.0)
        found: dict[str, list[int]] = {}
        for place in layout.places:
            for number, gradient in enumerate(passes.gradients[0, :, place.start : place.stop]):
                if not torch.equal(gradient, gradient.bfloat16().float()):
                    found.setdefault(place.name.split(".")[2], []).append(number)
        assert found == wide


@pytest.mark.parametrize("restrided", [False, True])
def test_inputs_pass_the_node_that_the_ranks_have(restrided: bool) -> None:
    """FSDP2's gives dims of size 1 other strides, and DeepSpeed's does not."""
    runner, module = _runner()
    name = "blocks.0"
    runner._hook(
        StepObservation(losses=(), passed_through=(name,), restrided=(name,) if restrided else ())
    )
    given: list[torch.Tensor] = []
    module.get_submodule(name).register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    module.get_submodule(name)(torch.randn(1, 4, requires_grad=True).as_strided((1, 4), (7, 1)))
    assert (given[0].stride() == (7, 1)) is not restrided


def test_a_forward_is_put_in_place_and_taken_back() -> None:
    module = torch.nn.Identity()
    _put(module, "forward", lambda x: x + 1)
    assert module(1) == 2
    _put(module, "forward", None)
    assert module(1) == 1 and "forward" not in module.__dict__


@pytest.mark.parametrize("restored", [False, True])
def test_masters_are_made_of_rounded_parameters_unless_a_state_was_restored(restored: bool) -> None:
    case = Case(mesh=(2,), start=Start(step=2, moments="typical"))
    module = build_model(case)
    start = StartState.of(
        case, module, ParameterLayout.of(module, case), restored=restored, rounded=torch.bfloat16
    )
    values = (
        initial_state(case, module)["stem.weight", "parameter"]
        if restored
        else module.get_parameter("stem.weight").detach()
    )
    rounded = values.bfloat16().float()
    assert not torch.equal(values, rounded)
    wanted = values if restored else rounded
    assert torch.equal(start.parameter[: values.numel()], wanted.reshape(-1))


A, B = [1.0] * 8, [2.0] * 8


def test_each_element_is_its_owners() -> None:
    copies, ranges = held(A, B), (range(0, 5), range(4, 8))
    owners = held(A[:5], A[4:], ranges=ranges)
    assert _by_owner(copies, owners).tolist() == [1.0] * 5 + [2.0] * 3
    assert _by_owner(copies, None) is copies.whole
    assert _by_owner(copies, held(A, A)) is copies.whole
    same = held(A, A)
    assert _by_owner(same, owners) is same.parts[0]
    # The second rank owns all, the first a part.
    every, part = held(A, A).plans[0], owners.plans[0]
    owners = held(A[:5], A, ranges=(range(5), range(8)))
    owners = type(owners)(owners.whole, owners.parts, (part, every), owners.manifests)
    assert _by_owner(copies, owners).tolist() == [1.0] * 5 + [2.0] * 3
    shards = held(A[:5], B[4:], ranges=ranges)
    assert _by_owner(shards, owners) is shards.whole


def test_what_each_rank_computes_with() -> None:
    copies = held(A, B, B)
    own = _per_rank(copies, copies.whole)
    assert own[0] is copies.whole and own[1] is copies.parts[1] and own[2] is copies.parts[2]
    shards = held(A[:5], B[4:], ranges=(range(0, 5), range(4, 8)))
    assert all(one is shards.whole for one in _per_rank(shards, shards.whole))


@pytest.mark.parametrize("of", [range(8), range(2, 8)])
def test_masters_round_to_what_ranks_compute_with(of: range) -> None:
    """Where every element has a master, and where the first two have none."""
    fine = [1 + 2.0**-9] * len(of)
    masters = held(fine) if len(of) == 8 else held(fine, ranges=(of,))
    roles = {"parameter": held(A), "master": masters}
    observation = SimpleNamespace(
        states=(),
        held=lambda step, point, role: roles.get(role),
        scalars=lambda *_: [{}],
        layout=layout(),
        dtype=lambda *_: torch.bfloat16,
    )
    found = State.observed(observation, 0)  # type: ignore[arg-type]
    assert found.mastered is not None
    assert found.mastered.tolist() == [element in of for element in range(8)]
    assert found.parameter.tolist() == [1 + 2.0**-9 if e in of else 1.0 for e in range(8)]
    assert found.published.tolist() == [1.0] * 8
