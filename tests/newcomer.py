"""A newcomer who follows the README alone: from `pip install` to the cause of a planted bug, timed.

    python tests/newcomer.py

clones the repository into an empty folder, makes an environment, and types what README.md shows:
the install, `my_sharding.py` with the bug of its example, the run, the test. It exits with 1 if the
cause is not named, or if it took longer than five minutes of processor time or of the clock's,
whichever is less (other work on the machine is not a newcomer's).
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300.0
CAUSE = "gradient x W"


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str, program: str) -> list[str]:
    """The indented commands that name a program."""
    return [line.strip() for line in re.findall(r"(?m)^    (\S.*)$", text) if program in line]


class Session:
    """A shell in the clone, and what it took."""

    def __init__(self, clone: Path) -> None:
        self.clone = clone
        self.began = time.monotonic()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        self.environment = {**kept, "PATH": f"{clone / '.venv' / 'bin'}:{kept['PATH']}"}

    def type(self, command: str, expected: int = 0) -> str:
        """Run a command; its output. Exits where its code is another than expected."""
        began, worked = time.monotonic(), processor_seconds()
        done = subprocess.run(
            shlex.split(command),
            cwd=self.clone,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds, work = time.monotonic() - began, processor_seconds() - worked
        print(f"{seconds:6.1f} s ({work:5.1f} s of processors)  {command}", flush=True)
        if done.returncode != expected:
            sys.exit(f"{done.stdout}\nexit code {done.returncode}, expected {expected}")
        return done.stdout


def processor_seconds() -> float:
    """Of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def planted(sharding: str, bug: str) -> str:
    """`my_sharding.py` with the lines of the bug before it returns, and what they need."""
    body, returning = sharding.rsplit("    return ", 1)
    body = body.replace("import fully_shard", "import FSDPModule, fully_shard")
    return f"{body}{bug.rstrip()}\n    return {returning}"


def main() -> int:
    """Follow the README; the exit code."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        clone = Path(folder) / "zerocheck"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        readme = (clone / "README.md").read_text(encoding="utf-8")
        session = Session(clone)
        install, *_ = commands(readme, "pip install")
        for command in install.split(" && ")[:2]:  # then it would run all that is built in
            session.type(command)
        sharding, bug, test = (
            next(code for code in blocks(readme, "python") if message in code)
            for message in ("# my_sharding.py", "# the bug:", "# test_my_sharding.py")
        )
        (clone / "my_sharding.py").write_text(planted(sharding, bug))
        (clone / "test_my_sharding.py").write_text(test)
        (run,) = (c for c in commands(readme, "zerocheck run my_sharding.py:my_fsdp --w"))
        message = session.type(run, expected=1)
        named = f"  cause       {CAUSE}" in message
        took = min(time.monotonic() - session.began, processor_seconds())
        replay = re.search(r"(?m)^  replay      (.*)$", message)
        named &= replay is not None and CAUSE in session.type(replay.group(1), expected=1)
        (tested,) = commands(readme, "pytest test_my_sharding.py")
        message = session.type(tested, expected=1)
        named &= "my_fsdp-gradient-basic" in message and f"  cause       {CAUSE}" in message
    print(f"{took:6.1f} s from `pip install` to {CAUSE!r}: {'named' if named else 'NOT NAMED'}")
    return 0 if named and took < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
