"""Print `comment.md` of an artifact as a code block of Markdown; nothing if there is none.

The code of a fork made the artifact. So no file of it is extracted, little of it is read, and it is
posted where markup, links and mentions have no meaning.
"""

from __future__ import annotations

import sys
import zipfile

BYTES = 20_000
LINES = 40


def quoted(archive: str) -> list[str]:
    """Return the lines of the comment. Raises errors of many kinds if there is none."""
    with zipfile.ZipFile(archive) as members, members.open("comment.md") as member:
        text = member.read(BYTES).decode(errors="replace")
    lines = text.splitlines()[:LINES]
    return ["This is what the code of a fork reported:", "", *(f"    {line}" for line in lines)]


if __name__ == "__main__":
    try:
        print("\n".join(quoted(sys.argv[1])))
    except Exception as error:
        sys.exit(f"no comment.md in the artifact: {type(error).__name__}: {error}")
