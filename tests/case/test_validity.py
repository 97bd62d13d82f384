"""Cases that are well-formed but impossible: each refused, with what is given and allowed."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from zerocheck.case.codec import merged
from zerocheck.case.schema import Block, Case, Model
from zerocheck.case.validity import MAX_ELEMENTS, check
from zerocheck.errors import UsageError

NORM = [{"kind": "batch_norm"}]
TOKENS = {"stem": "embedding", "inputs": 8}
OVERFLOW = {"loss_scale": 2.0, "overflow": 0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesh": [64, 32]}, "mesh [64, 32] has 2048 ranks; allowed: at most 1024"),
        (
            {"mesh": [4], "sharding": {"sync": "shards"}},
            "sharding.sync 'shards' needs a mesh of two axes, such as [2, 2]; given is [4]; "
            "allowed: 'last' or 'each'",
        ),
        (
            {"start": {"moments": "tiny"}},
            "start.moments is 'tiny', but start.step is 0, where the moments are zero",
        ),
        ({"model": {"tied": True}}, "model.tied needs the stem 'embedding', model.stem is 'dense'"),
        (
            {"model": {**TOKENS, "tied": True, "outputs": 7}},
            "model.tied needs model.outputs == model.inputs, given are 7 and 8",
        ),
        (
            {"model": {"padding_idx": 0}},
            "model.padding_idx needs the stem 'embedding', model.stem is 'dense'",
        ),
        (
            {"model": {**TOKENS, "padding_idx": 8}},
            "model.padding_idx is 8; allowed: 0 to 7 (model.inputs is 8)",
        ),
        (
            {"model": {"blocks": [{"kind": "mlp"}], "calls": [0, 1]}},
            "model.calls[1] is 1; allowed: 0 to 0 (the model has 1 blocks)",
        ),
        ({"model": {"calls": [0]}}, "model.calls[0] is 0; allowed: none"),
        ({"data": {"masked": True}}, "data.masked needs the stem 'embedding', model.stem is"),
        (
            {"model": TOKENS, "data": {"masked": True, "batch": 1, "length": 1}},
            "data.masked needs data.batch * data.length >= 2",
        ),
        (
            {"data": {"past_wrapper": True}, "training": {"compile": "eager"}},
            "data.past_wrapper needs a drawn model",
        ),
        (
            {"data": {"past_wrapper": True}, "precision": {"compute": "bf16"}},
            "data.past_wrapper needs a drawn model",
        ),
        ({"training": {"unfreeze": 1}}, "training.unfreeze needs frozen parameters, model.frozen"),
        (
            {"model": {"frozen": ["head.*"]}, "training": {"unfreeze": 2}},
            "training.unfreeze is 2; allowed: 1 to training.steps - 1, which is 1",
        ),
        ({"training": {"overflow": 0}}, "training.overflow needs training.loss_scale, which is"),
        (
            {"training": {"loss_scale": 2.0, "overflow": 2}},
            "training.overflow is 2; allowed: 0 to training.steps - 1, which is 1",
        ),
        (
            {"training": {"loss_scale": 2.0, "overflow_in": "head.weight"}},
            "training.overflow_in needs training.overflow, which is None",
        ),
        (
            {"training": {**OVERFLOW, "overflow_in": "head"}},
            "training.overflow_in is 'head'; allowed: a parameter that every microbatch trains "
            "(stem.weight, stem.bias, head.weight, head.bias)",
        ),
        (
            {"model": {"frozen": ["head.*"]}, "training": {**OVERFLOW, "overflow_in": "head.bias"}},
            "training.overflow_in is 'head.bias'; allowed: a parameter that every microbatch "
            "trains (stem.weight, stem.bias)",
        ),
        (
            {"model": {"side": True}, "training": {**OVERFLOW, "overflow_in": "side.bias"}},
            "training.overflow_in is 'side.bias'; allowed: a parameter that every microbatch",
        ),
        (
            {"training": {**OVERFLOW, "overflow_in": "head.bias", "compile": "eager"}},
            "training.overflow_in needs a model that is not compiled, of layers that are not "
            "sharded; allowed: training.compile 'none' and sharding.tensor_parallel 1",
        ),
        (
            {
                "training": {**OVERFLOW, "overflow_in": "head.bias"},
                "sharding": {"tensor_parallel": 2},
            },
            "training.overflow_in needs a model that is not compiled, of layers that are not",
        ),
        ({"training": {"loss_scale": 3.0}}, "training.loss_scale is 3; allowed: powers of two"),
        ({"training": {"loss_scale": 0.5}}, "training.loss_scale is 0.5; allowed: powers of two"),
        (
            {
                "model": {"frozen": ["head.*"]},
                "training": {"unfreeze": 1},
                "optimizer": {"groups": [{"pattern": "stem.*"}]},
            },
            "head.weight, head.bias matches no pattern of optimizer.groups",
        ),
        (
            {"model": {"width": 6, "blocks": [{"kind": "attention", "heads": 4}]}},
            "model.blocks[0].heads is 4, which does not divide model.width 6; allowed: 1, 2, 3, 6",
        ),
        (
            {"model": {"width": 6, "blocks": [{"kind": "group_norm", "heads": 5}]}},
            "model.blocks[0].heads is 5, which does not divide model.width 6",
        ),
        (
            {"model": {"blocks": [{"kind": "conv", "kernel": 2}]}},
            "model.blocks[0].kernel is 2; allowed: odd numbers, 1 to 15",
        ),
        (
            {"model": {"blocks": NORM}, "data": {"batch": 1, "length": 1}},
            "model.blocks[0] is a batch_norm, which needs data.batch * data.length >= 2",
        ),
        (
            {
                "model": {"width": 4, "blocks": [{"kind": "group_norm", "heads": 4}]},
                "data": {"batch": 1, "length": 1},
            },
            "model.blocks[0] is a group_norm with 1 value per group",
        ),
        (
            {"model": {"frozen": ["head.*", "stm.*"]}},
            "model.frozen: the pattern 'stm.*' matches no parameter (stem.weight, stem.bias, "
            "head.weight, head.bias)",
        ),
        ({"start": {"zeros": ["x"]}}, "start.zeros: the pattern 'x' matches no parameter"),
        (
            {"model": {"frozen": ["*"]}},
            "no trainable parameter is left that the loss depends on (model.frozen: '*')",
        ),
        (
            {"model": {"frozen": ["stem*", "head*"], "unused": True}},
            "no trainable parameter is left that the loss depends on",
        ),
        (
            {"model": {"frozen": ["stem*", "head*"], "side": True}},
            "needed is at least 1, with elements, that every rank uses",
        ),
        (
            {
                "model": {
                    "frozen": ["stem*", "head*", "*.experts.weight", "*.experts.bias"],
                    "blocks": [{"kind": "experts", "empty": True}],
                }
            },
            "needed is at least 1, with elements, that every rank uses",
        ),
        (
            {"optimizer": {"groups": [{"pattern": "*.bias"}]}},
            "stem.weight, head.weight matches no pattern of optimizer.groups ('*.bias')",
        ),
    ],
)
def test_messages(fields: dict[str, Any], message: str) -> None:
    case = merged(Case(), fields, source="x")
    with pytest.raises(UsageError) as caught:
        check(case)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": {"blocks": NORM, "calls": []}, "data": {"batch": 1, "length": 1}},
        {"model": {"blocks": NORM}, "data": {"batch": 2, "length": 1}},
        {"model": {**TOKENS, "tied": True, "outputs": 8, "padding_idx": 7}},
        {"model": {"frozen": ["stem.*"]}, "optimizer": {"groups": [{"pattern": "head.*"}]}},
        {"start": {"step": 3}},
    ],
)
def test_possible(fields: dict[str, Any]) -> None:
    check(merged(Case(), fields, source="x"))


def test_fields_out_of_bounds_are_seen_in_cases_made_by_hand() -> None:
    with pytest.raises(UsageError, match=r"the case: model.width is 0; allowed: an integer >= 1"):
        check(Case(model=Model(width=0)))
    with pytest.raises(UsageError, match=r"the case: data.loss_factor is null"):
        check(merged(Case(), {}, source="x").__class__(data={"loss_factor": float("nan")}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"model": {"inputs": 1 << 20, "width": 1 << 20}}, "the parameters would have 10995"),
        (
            {"model": {"width": 1 << 20, "blocks": [{"kind": "attention"}] * 128}},
            "the parameters would have 562",
        ),
        (
            {
                "data": {"batch": 256, "length": 256},
                "model": {"width": 256, "blocks": [{"kind": "attention", "heads": 256}]},
            },
            "the activations of one microbatch would have",
        ),
        (
            {
                "data": {"batch": 256, "length": 256},
                "model": {"blocks": [{"kind": "mlp", "hidden": 2048}], "calls": [0] * 256},
            },
            "the activations of one microbatch would have",
        ),
        (
            {
                "data": {"batch": 256, "length": 256},
                "model": {"blocks": [{"kind": "experts", "hidden": 1 << 14}]},
            },
            "the activations of one microbatch would have",
        ),
    ],
)
def test_absurd_cases_are_refused_fast_and_without_memory(
    fields: dict[str, Any], what: str
) -> None:
    case = merged(Case(), fields, source="x")
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(UsageError, match=rf"{what}\d* elements; allowed: at most {MAX_ELEMENTS}|"):
        check(case)
    taken = time.perf_counter() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 0.5
    assert peak < 4 << 20


def test_long_patterns_are_fast() -> None:
    blocks = tuple(Block(kind="mlp") for _ in range(128))
    frozen = tuple("*a" * 100 + str(i) for i in range(64))
    begin = time.perf_counter()
    with pytest.raises(UsageError, match="matches no parameter"):
        check(Case(model=Model(blocks=blocks, frozen=frozen)))
    assert time.perf_counter() - begin < 2
