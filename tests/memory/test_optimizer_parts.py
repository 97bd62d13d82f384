"""Parts of a model by optimizer, against arithmetic that is done here."""

from __future__ import annotations

from fractions import Fraction

import pytest

from zerocheck.errors import Unsupported, UsageError
from zerocheck.memory.analyse import analyse
from zerocheck.memory.optimizer_parts import (
    OptimizerPart,
    case_optimizer,
    parts_of,
    total_of,
    words_of,
)
from zerocheck.memory.setup import OPTIMIZERS, Setup
from zerocheck.memory.source import source
from zerocheck.optimizers import OPTIMIZERS as KNOWN

IN_BLOCKS = 3 * 2 * 4 * 37 * 37
"""Matrices of the three blocks of `small_models:small`."""
ELSE = 101 * 37 + 101 * 37 + 101 + 3 * (4 * 37 + 37)
"""Its embedding and its head, and all biases."""


def setup(name: str = "ddp", optimizer: str = "muon", **more: object) -> Setup:
    options = {"world_size": 4, "precision": "fp32", "batch": 3, "sequence": 29, **more}
    return Setup(model="small_models:small", implementation=name, optimizer=optimizer, **options)  # type: ignore[arg-type]


def test_muon_has_the_matrices_in_blocks() -> None:
    given = setup()
    model = source(given.model).build()
    assert parts_of(given, model) == (
        OptimizerPart(IN_BLOCKS, "muon"),
        OptimizerPart(ELSE, "adamw"),
    )
    assert case_optimizer(given, model).fallback == ("embedding.weight", "head.weight")
    parts = parts_of(given, model)
    assert total_of(parts, 4, 1) == Fraction(8 * (IN_BLOCKS + ELSE)) + IN_BLOCKS + 2 * ELSE
    assert total_of(parts, 4, 3) == 3 * IN_BLOCKS + 4 * ELSE
    assert total_of(parts, 1, 0, "mixed") == 12 * IN_BLOCKS + 16 * ELSE
    assert words_of(parts, 1) == (
        f"(8 Psi + 4 Psi/N of {IN_BLOCKS:,} by muon) + (8 Psi + 8 Psi/N of {ELSE:,} by adamw)"
    )


def test_another_optimizer_has_one_part() -> None:
    given = setup(optimizer="adagrad")
    parts = parts_of(given, source(given.model).build())
    assert parts == (OptimizerPart(IN_BLOCKS + ELSE, "adagrad"),)
    assert words_of(parts, 3) == "12 Psi/N"


def test_without_a_list_of_blocks_all_matrices_are_muons() -> None:
    given = Setup(model="small_models:plain", optimizer="muon")
    model = source(given.model).build()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert parts_of(given, model)[0] == OptimizerPart(matrices, "muon")
    assert matrices


def test_what_ddp_holds_with_muon_is_the_formula() -> None:
    found = analyse(setup()).between
    assert found.formula == 12 * IN_BLOCKS + 16 * ELSE
    assert found.held == found.formula + found.counts
    assert found.counts == 4 * (2 + 1 + 3 * 2)  # AdamW counts steps of each parameter, Muon none


def test_what_adafactor_holds_is_rows_and_columns() -> None:
    given = setup(optimizer="adafactor")
    biases = 101 + 3 * (4 * 37 + 37)
    means = 3 * 2 * (37 + 4 * 37) + 2 * (101 + 37) + biases
    parts = parts_of(given, source(given.model).build())
    assert parts == (OptimizerPart(IN_BLOCKS + ELSE, "adafactor", means),)
    assert words_of(parts, 1) == f"8 Psi + 4 M/N, M = {means:,} means"
    found = analyse(given).between
    assert found.formula == 8 * (IN_BLOCKS + ELSE) + 4 * means
    assert found.held == found.formula + found.counts
    with pytest.raises(UsageError, match="in-place operations that require placement changes"):
        analyse(setup("fsdp2", "adafactor"))


def test_fsdp2_makes_muon_of_its_own_shards() -> None:
    """Rows are rounded up on the first rank: 37 to 4 x 10, 148 to 4 x 37, 101 to 4 x 26."""
    found = analyse(setup("fsdp2"))
    muon, adamw = 3 * (37 * 37 + 10 * 148), 2 * 26 * 37 + 26 + 3 * (37 + 10)
    assert found.between.held == 12 * muon + 16 * adamw + found.between.counts


def test_every_optimizer_of_torch_has_a_formula() -> None:
    assert set(OPTIMIZERS) == set(KNOWN)
    for name in OPTIMIZERS:
        assert parts_of(setup(optimizer=name), source("small_models:small").build())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (("fsdp2", "rprop"), UsageError, "does not have a sharding strategy"),
        (("fsdp1", "muon"), Unsupported, "it makes one optimizer, and the case has Muon"),
        (("fsdp2", "user"), UsageError, "unknown optimizer 'user'"),
        (("fsdp2", "mon"), UsageError, "did you mean 'muon'"),
    ],
)
def test_refusals(given: tuple[str, str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        analyse(setup(*given))
