"""Mutants: which errors are put in, where they are not, and that the tree really has them."""

from __future__ import annotations

import ast

import pytest

from mutants.__main__ import CHOSEN, explained
from mutants.mutation import mutants, mutated
from mutants.trial import source_of


def _changes(source: str) -> set[tuple[str, str]]:
    return {(one.before, one.after) for one in mutants("m", source)}


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("x < y", {("x < y", "x <= y")}),
        ("x >= y > z", {("x >= y > z", "x > y > z"), ("x >= y > z", "x >= y >= z")}),
        ("a is not b", {("a is not b", "a is b")}),
        ("a and not b", {("a and (not b)", "a or not b"), ("a and (not b)", "a and b")}),
        ("x[2]", {("x[2]", "x[3]"), ("x[2]", "x[1]")}),
        ("x[a:b]", {("x[a:b]", "x[a + 1:b]"), ("x[a:b]", "x[a:b - 1]")}),
        ("2.0 - z", {("2.0 - z", f"{x} - z") for x in (4.0, 1.0)} | {("2.0 - z", "2.0 + z")}),
        ("any(x)", {("any(x)", "all(x)"), ("any(x)", "pass")}),
        ("x.abs()", {("x.abs()", "x"), ("x.abs()", "pass")}),
        ("U", {("U", repr(2.0**-8))}),
        ("format.u", {("format.u", repr(2.0**-24))}),
        (
            "-rounded(a, b)",
            {("-rounded(a, b)", "rounded(a, b)")}
            | {("-rounded(a, b)", f"-rounded(a, {x} * b)") for x in (2.0, 0.5)},
        ),
        ("a if b else c", {("a if b else c", "a"), ("a if b else c", "c")}),
        ("f(True)", {("f(True)", "f(False)"), ("f(True)", "pass")}),
    ],
)
def test_errors(source: str, changes: set[tuple[str, str]]) -> None:
    assert _changes(source) == changes


@pytest.mark.parametrize(
    "source",
    [
        '"""Words 1 < 2."""',
        "x = f'{a + 1}'",
        "raise ValueError(1)",
        "assert x < 1",
        "x: tuple[int, 3]",
        "text = 'a' if b else 'c'",
        "x = f(explanation=a + b, strict=True)",
        "from x import y",
    ],
)
def test_words_are_left_alone(source: str) -> None:
    assert _changes(source) == set()


def test_a_guard_is_taken_always_or_never() -> None:
    source = "def f(x):\n    if x:\n        return a\n    return b"
    made = [eval_f(mutated(source, one.number)) for one in mutants("m", source)]
    assert made == ["a a", "b b"]
    assert eval_f(mutated(source, None)) == "a b"


def eval_f(tree: ast.Module) -> str:
    """What f gives for True and for False."""
    names: dict[str, object] = {"a": "a", "b": "b"}
    exec(compile(tree, "m", "exec"), names)
    f = names["f"]
    assert callable(f)
    return f"{f(True)} {f(False)}"


@pytest.mark.parametrize("module", CHOSEN)
def test_mutants_of_the_judge_have_names_of_their_own_and_can_be_compiled(module: str) -> None:
    source = source_of(module).read_text()
    found = mutants(module, source)
    assert len({one.name for one in found}) == len(found) > 10
    for one in found[::60]:
        tree = mutated(source, one.number)
        assert ast.unparse(tree) != ast.unparse(ast.parse(source)), one.name
        compile(tree, module, "exec")


def test_what_is_explained_exists() -> None:
    names = {one.name for m in CHOSEN for one in mutants(m, source_of(m).read_text())}
    for one in explained():
        assert one.name in names and one.why.strip()
    with pytest.raises(IndexError):
        mutated("x", 5)
