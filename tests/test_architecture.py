"""The map of the package: docstrings of packages, ARCHITECTURE.md and its picture, the glossary."""

from __future__ import annotations

import ast
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from test_imports import ALLOWED

import zerocheck

PACKAGE = Path(zerocheck.__file__).parent
ROOT = Path(__file__).parent.parent
MAP = ROOT / "ARCHITECTURE.md"
DRAW = ROOT / "docs" / "architecture" / "draw.py"
GLOSSARY = ROOT / "docs" / "glossary.md"

LISTED = re.compile(r"(?m)^- `([\w.]+/?)`: \S")
NO_LIST: tuple[str, ...] = ()
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


def test_the_map_is_short_and_shows_the_picture() -> None:
    text = MAP.read_text(encoding="utf-8")
    assert len(text.split()) <= 500
    assert (
        "docs/architecture/rooms-dark.svg" in text and "docs/architecture/rooms-light.svg" in text
    )


def test_the_map_names_every_package() -> None:
    text = MAP.read_text(encoding="utf-8")
    names = {path.name for path in packages() if path.parent == PACKAGE}
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    """The script of the picture, imported."""
    spec = spec_from_file_location("draw", DRAW)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_what_the_script_draws(draw: ModuleType, theme: str) -> None:
    assert {*draw.THEMES} == {"light", "dark"}
    path = DRAW.with_name(f"rooms-{theme}.svg")
    assert path.read_text(encoding="utf-8") == draw.render(theme)


def test_a_package_that_is_not_drawn_is_noticed(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "FLOORS", draw.FLOORS[1:])
    with pytest.raises(ValueError, match="cli"):
        draw.check()


def test_no_import_runs_up(draw: ModuleType) -> None:
    """A package imports from its own floor and from those under it; a file counts as its room."""
    room_of = {
        name.removesuffix(".py"): room for room, names in draw.FILES.items() for name in names
    }
    rooms = {name for floor in draw.FLOORS for name in floor.rooms if name.strip()}
    up = [
        (part, other)
        for part, others in ALLOWED.items()
        for other in others
        if {room_of.get(part, part), room_of.get(other, other)} <= rooms
        if draw.floor_of(room_of.get(part, part)) > draw.floor_of(room_of.get(other, other))
    ]
    assert up == []


def test_the_way_of_a_case_is_through_rooms(draw: ModuleType) -> None:
    moves = [(move.start, move.end) for move in draw.WAY]
    assert moves[0][0] == "cli" and moves[-1][1] == "report"
    assert [move.label.split()[0] for move in draw.WAY] == [str(n + 1) for n in range(len(moves))]


def test_the_glossary_is_short() -> None:
    """At most 40 terms, in order, of one or two sentences each; linked from README and the map."""
    rows = re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \|$", GLOSSARY.read_text(encoding="utf-8"))[1:]
    terms = [term for term, _ in rows]
    assert 30 <= len(terms) <= 40 and terms == sorted(terms)
    assert all(1 <= len(re.findall(r"\.(?: |$)", meaning)) <= 2 for _, meaning in rows)
    for page in (ROOT / "README.md", MAP):
        assert "(docs/glossary.md)" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/recipes.md"])
def test_paths_of_the_page_exist(page: str) -> None:
    """Links, and files in backticks; capitals stand for a name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:zerocheck|tests|docs|reference)/[\w/.]*)`", text)
    paths = [(ROOT / page).parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
    paths += [ROOT / path for path in named if not re.search(r"[A-Z]{3}", path)]
    assert paths and [path for path in paths if not path.exists()] == []
