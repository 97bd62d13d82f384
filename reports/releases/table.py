"""Print the table of scripts.md: each fault by its script, in each release.

    python reports/releases/table.py reports/releases/scripts.tsv > reports/releases/scripts.md

The lines are those of `reports/releases/scripts`: release, script, and "yes", "no" or "fails".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tabulate import tabulate

FINDINGS = Path(__file__).parent.parent / "findings"

HEAD = """# Each fault by its script, in each release

The scripts of [findings](../findings/README.md) use the library alone. yes: the fault is there; no:
it is gone, or not there yet; fails: the script cannot tell, as where the release lacks what it
calls, or a GPU is needed.
"""


def main(lines: Path) -> None:
    """Print a table for each library."""
    cells: dict[str, dict[str, str]] = {}
    releases: list[str] = []
    for line in lines.read_text(encoding="utf-8").splitlines():
        release, script, there = line.split("\t")
        cells.setdefault(script, {})[release] = there
        if release not in releases:
            releases.append(release)
    print(HEAD)
    for library in ("torch", "deepspeed"):
        of = [one for one in releases if one.startswith(f"{library}==")]
        rows = []
        for page in sorted(FINDINGS.glob("*.md")):
            text = page.read_text(encoding="utf-8")
            for script in re.findall(r"alone:\*\*\s`python (\w+\.py)`", text):
                if {*of} & cells.get(script, {}).keys():
                    title = text.splitlines()[0].removeprefix("# ")
                    found = [cells[script].get(one, "") for one in of]
                    rows.append([f"[{title}](../findings/{page.name})", *found])
        names = [one.replace("==", " ") for one in of]
        if rows:
            print(tabulate(rows, ["fault", *names], "pipe", disable_numparse=True), end="\n\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
