"""Weights that are solved for, and their names."""

from __future__ import annotations

import math

import pytest
import torch

from zerocheck.case.mesh import mesh_of
from zerocheck.judge.attribution.sentences import operation
from zerocheck.judge.attribution.table import Numbers, Table, solve
from zerocheck.judge.diagnose.weights import ReductionSetting, every

NUMBERS = Numbers({"W": 4, "GA": 3})


def _terms(count: int, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, elements, dtype=torch.float64, generator=generator)


def test_weights_are_solved_for() -> None:
    terms = _terms(6, 50)
    weights = torch.tensor([1.0, 0.0, 0.25, 1.0, 2.0, -1.0], dtype=torch.float64)
    bound = torch.full((50,), 1e-7, dtype=torch.float64)
    noise = (_terms(1, 50)[0].clamp(-1, 1)) * bound
    solution = solve(terms, weights @ terms + noise, bound)
    assert solution is not None
    off = (solution.values - weights).abs()
    assert bool((off <= solution.uncertain).all()) and float(solution.uncertain.max()) < 1e-6
    assert solution.residual <= 2


def test_an_error_of_one_bound_everywhere_is_within_what_is_uncertain() -> None:
    """The worst error for one weight has the signs of its row of the pseudoinverse."""
    terms = _terms(3, 20)
    bound = torch.full((20,), 1e-3, dtype=torch.float64)
    inverse = torch.linalg.pinv((terms / bound).t())
    signs = inverse[1].sign()
    solution = solve(terms, terms[1] + signs * bound, bound)
    assert solution is not None
    assert abs(float(solution.values[1]) - 1) == pytest.approx(float(solution.uncertain[1]))


def test_dependent_terms_and_few_elements_give_no_solution() -> None:
    bound = torch.full((20,), 1e-7, dtype=torch.float64)
    terms = _terms(3, 20)
    terms[2] = terms[0] + terms[1]
    assert solve(terms, terms[0], bound) is None
    assert solve(_terms(3, 0), bound[:0], bound[:0]) is None
    few = _terms(3, 2)
    assert solve(few, few[0], bound[:2]) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_gives_no_solution(bad: float) -> None:
    bound = torch.full((20,), 1e-7, dtype=torch.float64)
    terms = _terms(3, 20)
    observed = terms[0].clone()
    observed[3] = bad
    assert solve(terms, observed, bound) is None
    terms[1, 2] = bad
    assert solve(terms, terms[0], bound) is None


def test_a_term_that_nothing_shows_has_no_weight() -> None:
    terms = _terms(2, 20)
    terms[1] *= 1e-12
    solution = solve(terms, terms[0], torch.full((20,), 1e-7, dtype=torch.float64))
    assert solution is not None
    assert solution.values[0] == pytest.approx(1) and math.isnan(float(solution.values[1]))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0 times"),
        (1.0, "once"),
        (4.0, "4 times (W = 4)"),
        (1 / 3, "0.333333 times (1/GA = 0.333333)"),
        (12.0, "12 times (GA W = 12)"),
        (2.0, "2 times (sqrt(W) = 2)"),
        (0.37, "0.37 times"),
    ],
)
def test_names_of_numbers(value: float, words: str) -> None:
    assert NUMBERS.spelled(value) == words


def test_numbers_that_coincide_are_all_named() -> None:
    assert Numbers({"W": 2, "GA": 2}).spelled(2.0) == "2 times (W = GA = 2)"


def test_the_nearest_number_must_be_within_what_is_uncertain() -> None:
    assert NUMBERS.nearest(3.99999, 1e-4) == 4.0
    assert NUMBERS.nearest(3.99999, 1e-7) == 3.99999


def _of(rows: list[list[float]], numbers: Numbers = NUMBERS, **others: float) -> str:
    table = Table(torch.tensor(rows, dtype=torch.float64), others)
    return operation({tuple(range(len(rows))): table}, numbers, mesh_of((len(rows),)))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[4, 4, 4]] * 4, "every local gradient counts 4 times (W = 4)"),
        ([[0, 0, 0]] * 4, "it is 0: no local gradient is in it"),
        ([[0, 0, 1]] * 4, "only microbatch 2 (the last of 3) is in it, once"),
        ([[1, 0, 1]] * 4, "microbatch 1 of 3 counts 0 times"),
        (
            [[1 / 16, 1 / 4, 1]] * 4,
            "microbatches 0 to 2 count 0.0625 times (1/W^2 = 0.0625), "
            "0.25 times (1/W = 0.25), once",
        ),
        ([[1] * 3, [0] * 3, [1] * 3, [1] * 3], "the local gradient of rank 1 counts 0 times"),
        (
            [[1] * 3, [0] * 3, [2] * 3, [1] * 3],
            "the local gradient of rank 1 counts 0 times and that of rank 2 counts "
            "2 times (sqrt(W) = 2)",
        ),
        (
            [[1] * 3, [1, 1, 0], [1] * 3, [1] * 3],
            "the local gradient of rank 1 of microbatch 2 counts 0 times",
        ),
        (
            [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]],
            "the weights of local gradients are wrong (weights, rank by rank / microbatch by "
            "microbatch, 1 is right: 1 2 3 / 4 5 6 / 7 8 9 / 1 1 1)",
        ),
    ],
)
def test_one_table_for_all_ranks(rows: list[list[float]], words: str) -> None:
    assert _of(rows) == words


def test_other_vectors_in_a_gradient() -> None:
    name = "the gradient of the step before"
    ones, zeros = [[1.0]] * 2, [[0.0]] * 2
    numbers = Numbers({"W": 2})
    assert _of(ones, numbers, **{name: 1.0}) == f"it is the right gradient plus {name}, once"
    assert _of(zeros, numbers, **{name: 1.0}) == (
        f"it is {name}, once, and no gradient of this step is in it"
    )
    assert "weights" in _of([[1.0], [0.0]], numbers, **{name: 1.0})


def _by_rank(tables: dict[int, list[list[float]]], mesh: tuple[int, ...]) -> str:
    made = {
        (rank,): Table(torch.tensor(rows, dtype=torch.float64)) for rank, rows in tables.items()
    }
    return operation(made, NUMBERS, mesh_of(mesh))


def _alone(rank: int, world: int = 4, factor: float = 1.0, columns: int = 1) -> list[list[float]]:
    return [[factor if row == rank else 0.0] * columns for row in range(world)]


def test_tables_that_differ_between_ranks() -> None:
    own = {rank: _alone(rank, factor=4.0) for rank in range(4)}
    assert _by_rank(own, (4,)) == (
        "each rank holds its own gradient alone, counted 4 times (W = 4): it is not reduced over "
        "all ranks"
    )
    pairs = {r: [[2.0] if row // 2 == r // 2 else [0.0] for row in range(4)] for r in range(4)}
    assert _by_rank(pairs, (4,)).startswith("ranks 0 and 1 and ranks 2 and 3 are reduced apart")
    assert "over the shard axis alone" in _by_rank(pairs, (2, 2))
    mixed = {rank: [[2.0 if row == rank else 0.0, 1.0] for row in range(4)] for rank in range(4)}
    assert _by_rank(mixed, (4,)).startswith(
        "only microbatch 1 of 2 is reduced over ranks; microbatch 0 is each rank's own"
    )
    right = [[1.0]] * 4
    some = {0: right, 1: right, 2: _alone(2), 3: _alone(3)}
    assert _by_rank(some, (4,)).startswith("on ranks 2 and 3, each rank holds its own gradient")


def test_a_factor_of_each_rank() -> None:
    """As where ranks divide by the number of ranks of their host, and hosts differ."""
    factors = {0: 2.0, 1: 2.0, 2: 4.0, 3: 4.0}
    assert _by_rank({rank: [[value]] * 4 for rank, value in factors.items()}, (4,)) == (
        "every local gradient counts 2 times (sqrt(W) = 2) on ranks 0 and 1 and 4 times (W = 4) "
        "on ranks 2 and 3"
    )


def test_a_weight_that_cannot_be_seen_agrees_with_any() -> None:
    table = Table(torch.tensor([[math.nan, 0.0]], dtype=torch.float64))
    assert table.agrees(torch.tensor([[0.0, 0.0]])) and table.agrees(torch.tensor([[5.0, 0.0]]))
    assert not table.agrees(torch.tensor([[0.0, 1.0]]))
    assert Table(torch.full((1, 2), math.nan)).right


def test_known_weights_for_vectors_that_are_too_short() -> None:
    two = ReductionSetting(2, 2, mean=True, mesh=mesh_of((2,)))
    of_rank_0 = [one.on(0).tolist() for one in every(two)]
    assert [[0.0, 0.0], [0.0, 0.0]] in of_rank_0 and [[0.0, 1.0], [0.0, 0.0]] in of_rank_0
    assert [[1.0, 1.0], [1.0, 0.0]] in of_rank_0 and [[4.0, 4.0], [0.0, 0.0]] in of_rank_0
    made = [one.on(4) for one in every(ReductionSetting(5, 1, mean=True, mesh=mesh_of((5,))))]
    groups = {tuple(one.flatten().nonzero().flatten().tolist()) for one in made}
    assert {(1, 2, 3, 4), (2, 3, 4), (3, 4), (4,)} <= groups  # halves of any size
