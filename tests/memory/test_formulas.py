"""The formulas give what the ZeRO paper prints."""

from __future__ import annotations

from fractions import Fraction

import pytest

from zerocheck.errors import UsageError
from zerocheck.memory.formulas import (
    communicated,
    persistent,
    recipe,
    redundancy,
    saved_share,
    saving,
    total,
    words,
)
from zerocheck.memory.presets import COUNTED

# Table 1 as printed: GB of stages 1, 2, 3 for 7.5B, 128B, 1T.
PRINTED = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}


@pytest.mark.parametrize("ranks", PRINTED)
def test_table_1(ranks: int) -> None:
    for elements, row in zip(COUNTED.values(), PRINTED[ranks], strict=True):
        for stage, printed in enumerate(row.split(), 1):
            digit = 10 ** -len(printed.partition(".")[2])
            ours = float(total(elements, ranks, stage)) / 1e9
            # The paper rounds some numbers and cuts others off.
            assert abs(ours - float(printed)) < digit, (elements, stage)


def test_the_four_formulas_in_mixed_precision() -> None:
    psi, n = 1000, 7
    assert total(psi, n, 0) == 16 * psi
    assert total(psi, n, 1) == 4 * psi + Fraction(12 * psi, n)
    assert total(psi, n, 2) == 2 * psi + Fraction(14 * psi, n)
    assert total(psi, n, 3) == Fraction(16 * psi, n)


def test_7b_in_fp32_on_8_ranks() -> None:
    fp32 = recipe("fp32")
    sizes = [float(total(7_000_000_000, 8, stage, fp32)) / 1e9 for stage in range(4)]
    assert sizes == [112, 63, 38.5, 14]
    assert [float(saved_share(8, stage, fp32)) for stage in range(4)] == [0, 0.4375, 0.65625, 0.875]
    limits = [float(saved_share(10**12, stage, fp32)) for stage in range(4)]
    assert limits == pytest.approx([0, 0.5, 0.75, 1])


def test_the_formulas_in_words() -> None:
    adamw, momentum, plain = (recipe("fp32", kind) for kind in ("adamw", "momentum", "sgd"))
    assert [words(stage, adamw) for stage in range(4)] == [
        "16 Psi", "8 Psi + 8 Psi/N", "4 Psi + 12 Psi/N", "16 Psi/N",
    ]  # fmt: skip
    assert [words(stage, momentum) for stage in range(4)] == [
        "12 Psi", "8 Psi + 4 Psi/N", "4 Psi + 8 Psi/N", "12 Psi/N",
    ]  # fmt: skip
    assert [words(stage, plain) for stage in (0, 1, 3)] == ["8 Psi", "8 Psi", "8 Psi/N"]


def test_70b_at_16_bytes() -> None:
    assert total(70_000_000_000, 1, 0) == 1120 * 10**9


def test_the_saving_of_stage_1() -> None:
    assert saving(100, 8, 1) == 12 * 100 * (1 - Fraction(1, 8))


def test_redundancy_is_n_where_nothing_is_cut_and_1_where_all_is() -> None:
    assert [redundancy(5, stage) for stage in (0, 3)] == [5, 1]
    assert 1 < redundancy(5, 2) < redundancy(5, 1) < 5


@pytest.mark.parametrize(
    ("optimizer", "mixed", "fp32"),
    [("sgd", 4, 0), ("momentum", 8, 4), ("adam", 12, 8), ("adamw", 12, 8), ("amsgrad", 16, 12)],
)
def test_k(optimizer: str, mixed: int, fp32: int) -> None:
    assert recipe("mixed", optimizer).states == mixed  # type: ignore[arg-type]
    assert recipe("fp32", optimizer).states == fp32  # type: ignore[arg-type]


def test_what_each_stage_cuts() -> None:
    whole = persistent(10, 5, 0)
    cut = [
        {kind for kind in whole if persistent(10, 5, stage)[kind] * 5 == whole[kind]}
        for stage in range(4)
    ]
    assert cut == [
        set(),
        {"optimizer"},
        {"optimizer", "gradient"},
        {"optimizer", "gradient", "parameter"},
    ]


def test_communication() -> None:
    assert [communicated(10, stage) for stage in range(4)] == [20, 20, 20, 30]


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown stage '4'"):
        total(1, 1, 4)
    with pytest.raises(UsageError, match="on 0 ranks"):
        total(1, 0, 1)
    with pytest.raises(UsageError, match="did you mean 'adamw'"):
        recipe("mixed", "adamww")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean 'mixed'"):
        recipe("mixd")  # type: ignore[arg-type]
