"""What README and docs show: their commands, and the files that they tell the reader to write."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted(ROOT.glob("docs/*.md")))
PROGRAMS = ("zerocheck", "torchrun", "pytest", "python", "pip", "tox", "git", "export")

_FENCE = re.compile(r"(?ms)^ *```(\w*)\n(.*?)^ *```$")


def blocks(path: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return _FENCE.findall(path.read_text(encoding="utf-8"))


def commands(path: Path) -> list[str]:
    """The indented lines that begin with a program, each command of `a && b` by itself."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found = []
    for line in re.findall(r"(?m)^ {4,}(\S.*)$", text):
        for command in line.split(" && "):
            plain = command.removeprefix(".venv/bin/").strip()
            if plain.split()[0] in PROGRAMS:
                found.append(plain)
    return found


def typed_commands(path: Path) -> list[str]:
    """Lines of `shell` blocks, which tests/test_sessions.py types."""
    texts = [text for language, text in blocks(path) if language == "shell"]
    return [line for text in texts for line in text.splitlines()]


def inline(path: Path) -> list[str]:
    """Commands of zerocheck within a sentence, with at least one argument."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    spans = re.findall(r"`(zerocheck \w+ [^`]*)`", text)
    return [" ".join(one.split()) for one in spans]


def arguments(command: str) -> list[str]:
    """What zerocheck is given: the words behind it."""
    words = shlex.split(command, comments=True)
    return words[words.index("zerocheck") + 1 :]


def example(name: str) -> str:
    """The Python, TOML or YAML block that begins with `# name`, wherever it stands.

    A JSON block has its name as `_comment`.
    """
    (text,) = (
        text
        for page in PAGES
        for language, text in blocks(page)
        if (language in ("python", "toml", "yaml") and text.startswith(f"# {name}\n"))
        or (language == "json" and f'"_comment": "{name}"' in text)
    )
    return text
