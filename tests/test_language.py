"""Names and docstrings of the package: one class for a name, first lines that read alone."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerocheck
from zerocheck import catalogue

PACKAGE = Path(zerocheck.__file__).parent
HEADLESS = ("What", "Whether", "Who", "That", "Those", "Of", "It", "As", "How", "The same")
"""Beginnings of sentences that are understood only with what stands around them."""

INJECTED = {place.partition(":")[2] for place in catalogue.INJECTED.values()}

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package, parsed."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def test_a_class_name_is_in_one_file() -> None:
    files: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(path)
    assert len(files) > 500
    several = {name: sorted(where) for name, where in files.items() if len(where) > 1}
    # A fault of the textbook and the same one injected into other implementations: one public name.
    assert {n: where for n, where in several.items() if n not in INJECTED} == {}


def headless(tree: ast.Module) -> Iterator[str]:
    """First lines of docstrings that do not stand alone."""
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if first.startswith(tuple(f"{word} " for word in HEADLESS)):
                yield f"{getattr(node, 'name', 'module')}: {first}"


def test_first_lines_of_docstrings_read_alone() -> None:
    found = {path: lines for path, tree in trees() if (lines := list(headless(tree)))}
    assert not found


@pytest.mark.parametrize("first", ["What is held.", "The same for ranks.", "Whether it is."])
def test_one_that_does_not_is_found(first: str) -> None:
    assert list(headless(ast.parse(f'def f():\n    """{first}"""')))
    assert not list(headless(ast.parse('def f():\n    """Return what is held."""')))
