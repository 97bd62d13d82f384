"""The map of the package: docstrings of packages, ARCHITECTURE.md and its picture, the glossary."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import zerocheck

PACKAGE = Path(zerocheck.__file__).parent
ROOT = Path(__file__).parent.parent
MAP = ROOT / "ARCHITECTURE.md"
DRAW = ROOT / "docs" / "architecture" / "draw.py"
GLOSSARY = ROOT / "docs" / "glossary.md"

LISTED = re.compile(r"(?m)^- `([\w.]+/?)`: \S")
NO_LIST = ("judge", "judge/diagnose", "attached")
"""Packages whose files are about to move: their docstrings list them afterwards."""


def packages() -> list[Path]:
    """Folders of the package with Python files, the package itself too."""
    return sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


def contents(folder: Path) -> set[str]:
    """Names of its files, and of its sub-packages with a slash; without `__init__.py`."""
    ignored = ("__init__.py", "py.typed")
    files = {path.name for path in folder.iterdir() if path.is_file()} - {*ignored}
    return files | {f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").exists()}


def listed(folder: Path) -> list[str]:
    """Names that its docstring lists, one line each."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    return LISTED.findall(ast.get_docstring(tree) or "")


@pytest.mark.parametrize("folder", packages(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_docstring_of_a_package_names_its_files(folder: Path) -> None:
    if folder.relative_to(PACKAGE).as_posix() in NO_LIST:
        return
    names = listed(folder)
    assert len(names) == len(set(names))
    assert set(names) == contents(folder)
