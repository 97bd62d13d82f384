"""Features of the model: zerocheck's own, or the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..schema import Block, Case, Model
from ..shapes import (
    called_blocks,
    calls_twice,
    empties,
    frozen_names,
    scalars,
    sometimes_used,
    transposed,
    uncalled,
)
from .row import Feature, Present, table


def _any_block(present: Callable[[Block], bool]) -> Present:
    """Return the test that some block is so that a forward calls: of others no gradient tells."""
    return lambda case: any(present(block) for block in called_blocks(case.model))


def _called(names: Callable[[Model], tuple[str, ...]]) -> Present:
    """Return the test that a forward uses one of these parameters."""

    def present(case: Case) -> bool:
        idle = uncalled(case.model)
        return any(not name.startswith(idle) for name in names(case.model))

    return present


MODEL = table(
    ("stem-dense", "linear stem", lambda c: c.model.stem == "dense"),
    ("stem-conv", "convolution stem", lambda c: c.model.stem == "conv"),
    ("stem-embedding", "embedding stem", lambda c: c.model.stem == "embedding"),
    ("no-blocks", "stem and head only", lambda c: not c.model.blocks),
    ("block-mlp", "MLP block", _any_block(lambda b: b.kind == "mlp")),
    ("block-attention", "attention block", _any_block(lambda b: b.kind == "attention")),
    ("block-conv", "convolution block", _any_block(lambda b: b.kind == "conv")),
    ("block-recurrent", "GRU block", _any_block(lambda b: b.kind == "recurrent")),
    (
        "block-experts",
        "mixture of experts with routing by token",
        _any_block(lambda b: b.kind == "experts"),
    ),
    ("block-layer-norm", "layer norm", _any_block(lambda b: b.kind == "layer_norm")),
    ("block-rms-norm", "RMS norm", _any_block(lambda b: b.kind == "rms_norm")),
    ("block-group-norm", "group norm", _any_block(lambda b: b.kind == "group_norm")),
    ("block-batch-norm", "batch norm with buffers", _any_block(lambda b: b.kind == "batch_norm")),
    (
        "relu",
        "ReLU, gradients of exactly 0",
        _any_block(lambda b: b.kind in ("mlp", "experts") and b.activation == "relu"),
    ),
    (
        "heads",
        "several attention heads",
        _any_block(lambda b: b.kind == "attention" and b.heads > 1),
    ),
    ("no-bias", "a block without bias", _any_block(lambda b: not b.bias)),
    ("residual", "residual connection", _any_block(lambda b: b.residual)),
    ("dropout", "dropout", _any_block(lambda b: b.dropout > 0)),
    ("head-without-bias", "head without bias", lambda c: not c.model.head_bias),
    ("tied", "head tied to the embedding", lambda c: c.model.tied),
    ("padding-idx", "embedding with a padding row", lambda c: c.model.padding_idx is not None),
    ("module-twice", "a module used twice", lambda c: calls_twice(c.model)),
    ("mixed-dtypes", "a block with bf16 parameters", _any_block(lambda b: b.dtype == "bf16")),
    ("unused", "parameters that no forward uses", lambda c: bool(uncalled(c.model))),
    (
        "sometimes-used",
        "parameters that some ranks use and others do not",
        lambda c: bool(sometimes_used(c.model)),
    ),
    ("side", "an input that only some microbatches have", lambda c: c.model.side),
    ("frozen", "frozen parameters", lambda c: bool(frozen_names(c.model))),
    ("checkpoint", "activation checkpointing", _any_block(lambda b: b.checkpoint)),
    (
        "checkpoint-dropout",
        "dropout inside a checkpoint",
        _any_block(lambda b: b.checkpoint and b.dropout > 0),
    ),
    ("parameter-0d", "a 0-d parameter", _called(scalars)),
    ("parameter-empty", "parameters without elements", lambda c: bool(empties(c.model))),
    ("transposed", "matrices stored transposed", _called(transposed)),
    dimension="model",
)


OF_PARAMETERS = frozenset(
    ("unused", "sometimes-used", "frozen", "parameter-0d", "parameter-empty", "transposed")
)
"""Features of models that follow from names, shapes and uses of parameters."""


def _or_of_user(row: Feature) -> Feature:
    """Return the feature, answered for a user's own model from the inspection of it."""

    def present(case: Case) -> bool:
        user = case.model.user
        return row.present(case) if user is None else row.name in user.features

    return row if row.name in OF_PARAMETERS else replace(row, present=present)


MODEL = [_or_of_user(row) for row in MODEL]
