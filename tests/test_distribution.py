"""The name of the distribution: on the package index, `zerocheck` is an unrelated project."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from zerocheck.version import DISTRIBUTION, install_extra

ROOT = Path(__file__).parent.parent
SKIPPED = {"tests/test_distribution.py"}
"""This file, whose examples are wrong on purpose."""

INSTALLER = r"\b(?:pip3?|pipx|uv|poetry|conda|pdm|tox)\b[^\n`]*?\b(?:install|add|run|tool)\b"
BARE = re.compile(
    rf"""{INSTALLER}[^\n`]*?[\s'"]zerocheck(?:[\[=<>~!@][^\n]*)?(?=[\s'"`),]|$)"""
    r"|(?<![\w./-])zerocheck\["
    r"|(?<![\w./-])zerocheck\s*(?:[=<>~!]=|@)\s*[\dg]"
    r'|^\w+ = \[.*"zerocheck"\]$',
    re.MULTILINE,
)
"""Install command, requirement or extra with the bare name."""
COMMAND = re.compile(r"(?:&&|;|\|\||- run:|bin/)\s*zerocheck\s")
"""The command of that name, in a line with an install command before it."""


def bare_names(text: str) -> list[str]:
    without_commands = COMMAND.sub(" ", text)
    return [match.group() for match in BARE.finditer(without_commands)]


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:  # a source distribution, without git
        return [path for path in ROOT.rglob("*") if path.suffix in {".md", ".py", ".toml", ".yml"}]
    return [ROOT / name for name in listed.stdout.split("\0") if name and name not in SKIPPED]


def test_no_install_command_has_the_bare_name() -> None:
    wrong = {}
    for path in tracked():
        if path.suffix in {".xz", ".png"} or not path.is_file():
            continue
        names = bare_names(path.read_text(encoding="utf-8", errors="replace"))
        if names:
            wrong[str(path.relative_to(ROOT))] = names
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "pip install zerocheck .",
        "pip install -U 'zerocheck[metrics]'",
        "  - run: pip install torch zerocheck",
        "uv pip install zerocheck==0.1.0",
        "uv add zerocheck",
        "with the extra `zerocheck[deepspeed]`",
        "zerocheck @ git+https://example.org/zerocheck",
        "zerocheck>=0.1",
        'test = ["pytest>=8.0", "zerocheck"]',
    ],
)
def test_a_bare_name_is_seen(text: str) -> None:
    assert bare_names(text)


@pytest.mark.parametrize(
    "text",
    [
        install_extra("metrics"),
        "pip install -c constraints.txt . && .venv/bin/zerocheck run",
        "pip install ./zerocheck .",
        "pip install 'zerocheck-sharding[deepspeed]'",
        "zerocheck-sharding @ git+https://example.org/zerocheck",
        "`zerocheck list` shows them",
    ],
)
def test_other_uses_of_the_word_are_fine(text: str) -> None:
    assert not bare_names(text)


def test_the_project_has_the_name_of_the_distribution() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'name = "{DISTRIBUTION}"' in project
