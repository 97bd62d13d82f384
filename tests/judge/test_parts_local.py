"""How the reference is made to run as a rank did: threads, mode, places of parameters."""

from __future__ import annotations

import torch
from small import held

from zerocheck.case.schema import Block, Case, Model
from zerocheck.drive.observation import StepSeen
from zerocheck.judge.layout import Layout
from zerocheck.judge.local import LocalRunner, as_on_a_rank
from zerocheck.judge.state import _by_owner, _own
from zerocheck.models.network import build_model


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
    return LocalRunner(module, case, Layout.of(module, case)), module


def test_evaluation_ends() -> None:
    runner, module = _runner()
    with runner.evaluating():
        assert not module.training
    assert module.training


def test_parameters_are_put_where_they_were() -> None:
    runner, module = _runner()
    weight, bias = module.get_parameter("head.weight"), module.get_parameter("head.bias")
    values = weight.detach().clone()
    seen = StepSeen(losses=(), misaligned={"head.weight": 20}, strides={"head.weight": (1, 2)})
    runner._place(seen)
    assert weight.data_ptr() % 64 == 20 and weight.stride() == (1, 2)
    assert torch.equal(weight, values) and bias.data_ptr() % 64 == 0
    where = weight.data_ptr()
    more = StepSeen(losses=(), misaligned={"head.weight": 20, "head.bias": 4}, strides=seen.strides)
    runner._place(more)
    assert weight.data_ptr() == where, "it stays"
    assert bias.data_ptr() % 64 == 4
    runner._place(StepSeen(losses=()))
    assert weight.data_ptr() % 64 == bias.data_ptr() % 64 == 0
    assert weight.is_contiguous() and torch.equal(weight, values)


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
    own = _own(copies, copies.whole)
    assert own[0] is copies.whole and own[1] is copies.parts[1] and own[2] is copies.parts[2]
    shards = held(A[:5], B[4:], ranges=(range(0, 5), range(4, 8)))
    assert all(one is shards.whole for one in _own(shards, shards.whole))
