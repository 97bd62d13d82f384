"""Shards, names, groups and semantics."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerocheck.case.schema import Case, Group, Optimizer, Start
from zerocheck.contract import Semantics, Shard, groups, implementation, make_optimizer
from zerocheck.contract.groups import group_of, learning_rates
from zerocheck.contract.loading import load
from zerocheck.contract.names import unwrapped
from zerocheck.contract.refusals import advise
from zerocheck.contract.semantics import RENAMED
from zerocheck.errors import UsageError


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0, max_size=4)))
    parts = []
    for size in shape:
        low = draw(st.integers(0, size))
        parts.append(slice(low, draw(st.integers(low, size))))
    return shape, tuple(parts)


@given(_boxes())
def test_flat_range_is_what_indexing_gives(box: tuple) -> None:
    """A flat range is given exactly where the indexed elements are one range of the whole."""
    shape, index = box
    numbers = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).view(shape)
    held = numbers[index].reshape(-1).tolist()
    shard = Shard("w", "parameter", None, shape, index)
    found = shard.flat_range()
    if found is not None:
        start, stop = found
        assert list(range(start, stop)) == held
    else:
        assert len(held) == 0 or held != list(range(held[0], held[0] + len(held)))


def test_flat_range_of_a_slice_and_of_the_whole() -> None:
    assert Shard("w", "parameter", None, (3, 4), slice(2, 7)).flat_range() == (2, 7)
    assert Shard("w", "parameter", None, (3, 4)).flat_range() == (0, 12)
    assert Shard("w", "parameter", None, ()).flat_range() == (0, 1)


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        ("module.blocks.0.weight", "blocks.0.weight"),
        ("module.module.a", "a"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.b", "a.b"),
        ("_orig_mod.a._checkpoint_wrapped_module.b", "a.b"),
        ("my.module.weight", "my.module.weight"),
        ("_orig_mod.module._orig_mod.module.a", "a"),
        ("_orig_mod.my.module.weight", "my.module.weight"),
    ],
)
def test_names_of_the_unwrapped_model(wrapped: str, name: str) -> None:
    assert unwrapped(wrapped) == name


def test_groups_follow_the_case() -> None:
    case = Case(
        optimizer=Optimizer(
            groups=(Group(pattern="*.bias", lr=0.5), Group(pattern="none.*"), Group(lr=0.25)),
            amsgrad=True,
            kernel="fused",
        )
    )
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    found = groups(model, case)
    assert [len(group["params"]) for group in found] == [1, 0, 2]
    assert [group["lr"] for group in found] == [0.5, 1e-3, 0.25]
    optimizer = torch.optim.AdamW(found)
    assert all(group["amsgrad"] and group["fused"] for group in optimizer.param_groups)


def test_groups_of_two_optimizers() -> None:
    options = Optimizer(
        kind="muon",
        momentum=0.95,
        nesterov=True,
        fallback=("1.*",),
        groups=(Group(pattern="*.bias", lr=0.5), Group(lr=0.25)),
    )
    case = Case(optimizer=options)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    (muon,) = groups(model, case, "muon")
    assert muon["params"] == [model[0].weight] and muon["lr"] == 0.25 and muon["nesterov"]
    adamw = groups(model, case, "adamw")
    assert [len(group["params"]) for group in adamw] == [2, 1]
    assert adamw[1]["params"][0] is model[1].weight
    assert [group["use_muon"] for group in groups(model, case)] == [True, False, False]
    made = make_optimizer(model, case)
    assert [type(one) for one in made] == [torch.optim.Muon, torch.optim.AdamW]
    with pytest.raises(UsageError, match="'sgd'"):
        groups(model, case, "sgd")
    # torch's optimizers refuse an empty list.
    (nothing,) = groups(torch.nn.LayerNorm(3), case, "muon")
    assert nothing["params"] == [] and torch.optim.Muon([nothing])


def test_a_name_that_no_group_matches() -> None:
    case = Case(optimizer=Optimizer(groups=(Group(pattern="head.*"),)))
    with pytest.raises(UsageError, match=re.escape("'stem.bias' matches no group pattern")):
        group_of(case, "stem.bias")


def test_schedules_start_where_training_does() -> None:
    warm = Case(optimizer=Optimizer(schedule="warmup"), start=Start(step=2, moments="typical"))
    assert learning_rates(warm, 0) == [1e-3 * 0.75]
    assert learning_rates(warm, 1) == [1e-3]
    assert learning_rates(Case(), 5) == [1e-3]
    cosine = Case(optimizer=Optimizer(schedule="cosine"))
    assert learning_rates(cosine, 0)[0] > learning_rates(cosine, 4)[0] > 0


@pytest.mark.parametrize("there", [False, True])
def test_a_seed_is_that_of_torch(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there are other devices or not, and those are seeded if there are."""
    whole: list[int] = []
    real = torch.manual_seed
    monkeypatch.setattr(implementation, "_accelerated", lambda: there)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: (whole.append(seed), real(seed)))
    implementation.seed_all(2**32 - 5)
    drawn = torch.rand(3)
    real(2**32 - 5)
    assert torch.equal(drawn, torch.rand(3))
    assert whole == ([2**32 - 5] if there else [])


def test_semantics_take_known_words_only() -> None:
    with pytest.raises(UsageError, match=r"unknown Semantics.average 'means'; did you mean 'mean'"):
        Semantics(average="means")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "declared", "message"),
    [
        ((), {"divided": "own"}, r"Semantics\.divided is called divide_ranks"),
        ((), {"summed": "fp32"}, r"Semantics\.summed is called accumulate_dtype"),
        ((), {"wieght": "token"}, r"unknown declaration of Semantics 'wieght'; did you mean 'wei"),
        (("sum",), {}, r"takes each declaration by its name, such as average='sum'"),
    ],
)
def test_what_is_no_declaration_is_refused(
    words: tuple[str, ...], declared: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Semantics(*words, **declared)  # type: ignore[misc, arg-type]
    assert copy.deepcopy(pickle.loads(pickle.dumps(Semantics(average="sum")))).average == "sum"


def test_earlier_names_lead_to_fields() -> None:
    names = {field.name for field in fields(Semantics)}
    assert {*RENAMED.values()} <= names and not {*RENAMED} & names


def test_a_module_that_is_a_file_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_sharding.py").write_text("def my_fsdp(model, case, mesh): ...\n")
    with pytest.raises(UsageError, match=r"did you mean 'my_own_sharding:my_fsdp'\?"):
        load("my_own_shardign:my_fsdp")
    with pytest.raises(UsageError, match=r"no module 'other', neither .* nor installed$"):
        load("other:my_fsdp")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo"),
            "set_force_sum_reduction_for_comms(True)",
        ),
        (RuntimeError("fullgraph=True found no compiled frames"), '"compile"}'),
        (RuntimeError("FSDP needs a non-CPU accelerator device, but"), "device_id="),
    ],
)
def test_an_error_that_is_known_says_what_to_do(error: Exception, advice: str) -> None:
    other = ValueError(str(error))
    for one in (error, other):
        advise(one)
    assert advice in error.__notes__[0]
    assert not hasattr(other, "__notes__")
