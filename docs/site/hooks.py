"""Hooks of mkdocs: pages of the whole repository, generated pages, and links between them.

The pages are written to be read where they lie, so links are paths in the repository. README.md
becomes the start page, pages outside of docs/ keep their path, and a link to what is no page, such
as a script, becomes its path in words.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from zerocheck.case.features import FEATURES
from zerocheck.protocol.verdicts import OBLIGATION_SETS, TITLES, VACUOUS

ROOT = Path(__file__).parents[2]
OUTSIDE = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "reports/**/*.md")
"""Pages outside of docs/."""
CODE_OR_LINK = re.compile(
    r"^```[\s\S]*?^```$"  # a block of code
    r"|^(?: {4}|\t)[^\n]*$"
    r"|\[(?P<words>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)"
    r"|`[^`\n]+`",
    re.MULTILINE,
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/ and the generated ones."""
    index = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=index))
    for page in sorted(one for pattern in OUTSIDE for one in ROOT.glob(pattern)):
        name = page.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=page.read_text(encoding="utf-8")))
    for picture in sorted(ROOT.glob("reports/**/*.svg")):
        name = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=picture.read_bytes()))
    files.append(File.generated(config, "obligations.md", content=obligations()))
    files.append(File.generated(config, "features.md", content=features()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to paths of the repository into links of the site."""
    here = source_of(page.file.src_uri)
    return CODE_OR_LINK.sub(
        lambda found: linked(found, here, files) if found["target"] else found.group(0), markdown
    )


def linked(found: re.Match[str], here: str, files: Files) -> str:
    """Return a link as it is on the site, or its words where there is no such page."""
    words, target = found["words"], found["target"]
    if re.match(r"[a-z]+:|#", target):
        return found.group(0)
    path, _, anchor = target.partition("#")
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    if not (ROOT / wanted).exists():
        raise PluginError(f"{here} links to {target}, which is not there")
    index = f"{wanted}/README.md" if (ROOT / wanted).is_dir() else wanted
    page = files.get_file_from_path(page_of(index))
    if page is None:
        return words if wanted in words else f"{words} (`{wanted}`)"
    start = posixpath.dirname(page_of(here)) or "."
    link = posixpath.relpath(page.src_uri, start)
    return f"[{words}]({link}{'#' + anchor if anchor else ''})"


def page_of(source: str) -> str:
    """Return the page of a file of the repository, if it is one."""
    if source == "README.md":
        return "index.md"
    return source.removeprefix("docs/")


def source_of(page: str) -> str:
    """Return the file of the repository that a page is made of."""
    if page == "index.md":
        return "README.md"
    return page if (ROOT / page).is_file() else f"docs/{page}"


def obligations() -> str:
    """Return the page of all obligations."""
    return "\n".join(["# Obligations", "", *_obligations()]) + "\n"


def _obligations() -> Iterator[str]:
    yield "What is checked of every case, and when a case in which it holds says nothing."
    for name, of in OBLIGATION_SETS.items():
        yield f"\n## {name.capitalize()}\n"
        yield "| obligation | it demands | it could not fail where |"
        yield "|---|---|---|"
        for one in of:
            yield f"| `{one}` | {TITLES[one]} | {VACUOUS.get(one, '')} |"


def features() -> str:
    """Return the page of all features of cases, by dimension."""
    lines = ["# Features", "", "What a case can have. `zerocheck run --feature NAME` asks for it."]
    for dimension in dict.fromkeys(one.dimension for one in FEATURES.values()):
        lines += ["", f"## {dimension.capitalize()}", "", "| feature | a case has |", "|---|---|"]
        lines += [
            f"| `{name}` | {one.title} |"
            for name, one in FEATURES.items()
            if one.dimension == dimension
        ]
    return "\n".join(lines) + "\n"
