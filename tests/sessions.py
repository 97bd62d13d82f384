"""Sessions of the pages: files to write, commands to type and what they print, taken literally.

    python tests/sessions.py README.md
    python tests/sessions.py --all

runs the page (or each page with a session) in a fresh clone, with an environment that has only what
the page installs, and writes what was printed into the page. A page has a session if it has a block
of the language `shell`:

- a block whose first line is a comment with a file name is that file;
- a `shell` block is typed as it stands, in the shell of the blocks before it;
- a `text` block behind a comment `<!-- show: FROM..TO | LINE -->` is what the `shell` block before
  it prints: the lines from a match of FROM to one of TO, and those that match LINE. What lies
  between is `...`;
- a comment `<!-- picture: REPORT.html PICTURE.png -->` is a picture of a report at that moment. The
  script takes it with Debian's chromium.

Pages of docs begin after README's installation, with the files that README shows, and
those that PAGE shows after a comment `<!-- files: PAGE -->`. A block with `pip install` is typed
before all other blocks, in the clone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from documents import PAGES, README, ROOT

LIMIT_S = 900.0
"""Seconds for a whole page."""

_BLOCK = re.compile(
    r"^(?:<!-- show: (?P<show>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$"
    r"|^<!-- picture: (?P<report>\S+) (?P<picture>\S+) -->$",
    re.MULTILINE | re.DOTALL,
)
PICTURE = "picture"
"""Language of a step that is a picture of a report; its text is the path of the report."""
_END = "END-OF-FILE"
_FILE = re.compile(r"# (\S+\.\w+)\n|\{\n  \"_comment\": \"(\S+)\"")


@dataclass
class Step:
    """Block of a page. place: where its text stands; show: lines of an output that it shows."""

    language: str
    text: str
    place: tuple[int, int]
    show: str = ""
    output: str = ""
    code: int = 0
    seconds: float = 0.0

    @property
    def file(self) -> str | None:
        """Name of the file that the block is."""
        name = None if self.language in ("shell", "text", PICTURE) else _FILE.match(self.text)
        return None if name is None else name.group(1) or name.group(2)

    @property
    def installs(self) -> bool:
        """True if the block is typed in the clone, before all others."""
        return self.language == "shell" and "pip install" in self.text


@dataclass
class Session:
    """Session of a page, and what it printed."""

    page: Path
    steps: list[Step] = field(default_factory=list)

    @classmethod
    def of(cls, page: Path) -> Session:
        """Read the blocks of a page."""
        text = page.read_text(encoding="utf-8")
        return cls(
            page,
            [
                Step(PICTURE, block["report"], block.span(), block["picture"])
                if block["picture"]
                else Step(block["language"], block["text"], block.span("text"), block["show"] or "")
                for block in _BLOCK.finditer(text)
            ],
        )

    @property
    def commands(self) -> list[Step]:
        """Blocks that are typed."""
        return [step for step in self.steps if step.language == "shell"]

    def shown(self) -> list[tuple[Step, Step]]:
        """Pairs of a command and the block that shows what it prints."""
        pairs = []
        command = None
        for step in self.steps:
            if step.language == "shell":
                command = step
            elif step.show and step.language != PICTURE:
                assert command is not None, f"{self.page.name}: nothing was typed for {step.show}"
                pairs.append((command, step))
        return pairs

    def run(self, clone: Path, outside: Path | None = None) -> None:
        """Type the page in a shell in the clone.

        outside: directory where all blocks but the first are typed.
        """
        folder = Path(tempfile.mkdtemp(prefix="session-"))
        before = [step for page in self.pages_before() for step in Session.of(page).steps]
        lines = [f"{{\n{step.text}}} > /dev/null" for step in before if step.installs]
        numbers = range(len(self.steps))
        for number in numbers:
            if self.steps[number].installs:
                lines += self._typed(number, folder)
        lines += [] if outside is None else [f"cd {outside}"]
        lines += [
            f"cat > {step.file} <<'{_END}'\n{step.text}{_END}" for step in before if step.file
        ]
        for number in numbers:
            if not self.steps[number].installs:
                lines += self._typed(number, folder)
        script = folder / "session.sh"
        script.write_text("\n".join(lines) + "\n", encoding="utf-8")
        try:
            subprocess.run(
                ["bash", script],
                cwd=clone,
                env=environment(),
                stdin=subprocess.DEVNULL,
                check=False,
                timeout=LIMIT_S,
            )
            for number, step in enumerate(self.steps):
                if step.language == "shell":
                    read = {
                        kind: (folder / f"{number}.{kind}").read_text(encoding="utf-8")
                        for kind in ("out", "code", "began", "ended")
                    }
                    step.output, step.code = read["out"], int(read["code"])
                    step.seconds = float(read["ended"]) - float(read["began"])
                elif step.language == PICTURE:
                    step.output = (folder / f"{number}.html").read_text(encoding="utf-8")
        finally:
            shutil.rmtree(folder)

    def pages_before(self) -> list[Path]:
        """Return the pages whose installations and files the session begins with."""
        named = re.findall(r"(?m)^<!-- files: (\S+) -->$", self.page.read_text(encoding="utf-8"))
        first = [README] if self.page != README and ROOT in self.page.parents else []
        return first + [self.page.parent / name for name in named]

    def _typed(self, number: int, folder: Path) -> list[str]:
        """Lines of the script for a block, which leave in the folder what it printed."""
        step = self.steps[number]
        if step.language == "shell":
            return [
                f"date +%s.%N > {folder}/{number}.began",
                f"{{\n{step.text}}} > {folder}/{number}.out 2>&1",
                f"echo $? > {folder}/{number}.code; date +%s.%N > {folder}/{number}.ended",
            ]
        if step.language == PICTURE:
            return [f"cp {step.text} {folder}/{number}.html"]
        return [f"cat > {step.file} <<'{_END}'\n{step.text}{_END}"] if step.file else []

    def failures(self) -> list[Step]:
        """Commands that failed although no block shows what they print."""
        shown = {id(command) for command, _ in self.shown()}
        return [step for step in self.commands if step.code and id(step) not in shown]

    def written(self) -> str:
        """The page with what was printed."""
        text = self.page.read_text(encoding="utf-8")
        for command, step in reversed(self.shown()):
            start, end = step.place
            text = text[:start] + selected(command.output, step.show) + text[end:]
        return text


def pages_with_sessions() -> list[Path]:
    """Pages with a block that is typed."""
    return [page for page in PAGES if Session.of(page).commands]


def take_picture(html: str, picture: Path) -> None:
    """Write the first screen of a report as a picture, with chromium."""
    with tempfile.TemporaryDirectory(prefix="session-") as folder:
        page = Path(folder, "report.html")
        page.write_text(html, encoding="utf-8")
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        size = "--window-size=1280,900"
        subprocess.run(
            [*command, size, f"--screenshot={picture}", page.as_uri()],
            check=True,
            capture_output=True,
        )


def environment() -> dict[str, str]:
    """The environment of a reader: nothing of this Python, of pytest, tox or zerocheck."""
    hidden = ("PYTHON", "PYTEST", "TOX", "VIRTUAL_ENV", "GITHUB", "ZEROCHECK", "PIP_CONSTRAINT")
    hidden = (*hidden, "PIP_BUILD_CONSTRAINT", "COVERAGE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    own = Path(sys.prefix, "bin")
    path = [part for part in kept["PATH"].split(os.pathsep) if Path(part) != own]
    return {**kept, "PATH": os.pathsep.join(path), "COLUMNS": "120", "PIP_COMPILE": "0"}


def fresh_clone(folder: Path) -> Path:
    """Clone what is tracked, as it is in the working tree, into a folder."""
    clone = folder / "zerocheck"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    changed = subprocess.run(
        ["git", "diff", "HEAD", "--binary"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    if changed:
        subprocess.run(["git", "apply"], cwd=clone, input=changed, check=True)
    return clone


def selected(output: str, show: str) -> str:
    """Return the lines of an output that `show` selects, with `...` for those between."""
    lines = output.splitlines()
    chosen: list[int] = []
    for part in show.split(" | "):
        first, _, last = part.partition("..^")
        begins = [n for n, line in enumerate(lines) if re.search(first, line)]
        assert begins, f"no line matches {first!r}:\n{output}"
        begin = end = begins[0]
        if last:
            later = (n for n in range(begin, len(lines)) if re.search(f"^{last}", lines[n]))
            end = next(later, -1)
            assert end >= 0, f"no line after {first!r} matches {last!r}:\n{output}"
            begin = max(n for n in begins if n <= end)
        chosen += range(begin, end + 1)
    text, before = "", None
    for number in sorted(set(chosen)):
        if before is not None and number != before + 1 and any(lines[before + 1 : number]):
            text += "...\n"
        text += f"{lines[number].rstrip()}\n"
        before = number
    return text


def comparable(text: str) -> str:
    """Return a text without times, and without the digits of numbers that a processor may round."""
    text = re.sub(r"\d+(\.\d+)?e[+-]\d+|\d+\.\d{3,}", "#", text)
    return re.sub(r"\b\d+(\.\d+)? ?s\b", "# s", text)


def main() -> int:
    """Run the pages that are named, and write what they print."""
    names = sys.argv[1:]
    pages = pages_with_sessions() if names == ["--all"] else [ROOT / name for name in names]
    failures = 0
    for page in pages:
        with tempfile.TemporaryDirectory(prefix="session-") as folder:
            session = Session.of(page)
            began = time.monotonic()
            session.run(fresh_clone(Path(folder)))
            for step in session.commands:
                head = step.text.strip().splitlines()[-1]
                print(f"{step.seconds:6.1f} s  exit {step.code}  {head}", flush=True)
            print(f"{time.monotonic() - began:6.1f} s  {page.name}")
            for command in session.failures():
                print(f"exit {command.code}, and no block shows it:\n{command.output}")
                failures += 1
            session.page.write_text(session.written(), encoding="utf-8")
            for step in session.steps:
                if step.language == PICTURE:
                    take_picture(step.output, ROOT / step.show)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
