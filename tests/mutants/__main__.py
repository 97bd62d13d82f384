"""`python -m mutants`: puts small errors into the judge, and demands that the tests see them.

It fails unless the tests kill 95 % of the mutants, and if a mutant survives that explained.toml
does not explain, or is explained there and does not survive. What it tried is in its report:
module, line, the code before and after, the test that killed it, and seconds.

Why not a library (looked at in November 2026):

- mutmut 3.8 leaves decorated functions alone (all but static and class methods), so adamw_step,
  gradient_norm and average, which stand under torch.no_grad(), and every property; and all that
  stands outside of functions: the table of number formats, U, ETA. It has no way to choose or add
  kinds of mutants: none doubles or halves a bound, takes another dtype's round-off, drops an abs
  or turns any into all, while most would change messages and drop arguments.
- cosmic-ray 8.7 edits the files in place, so one copy of the tree can try one mutant at a time; it
  runs one command for all mutants, and each run imports torch anew (2.4 s of processor time).

Here all tests are collected once, with torch imported. For each mutant the process is forked, what
is changed in memory, and only the tests that run the changed lines are run, the quickest first;
what ranks did is read from a recording, since ranks do not judge.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import hypothesis
import pytest

from .mutation import Mutant, mutants, mutated
from .trial import Child, Covered, kill, record, source_of

CHOSEN = {
    "zerocheck.judge.bounds": 0.25,
    "zerocheck.judge.compare": 0.5,
    "zerocheck.judge.layout": 0.15,
    "zerocheck.judge.assemble": 0.15,
    "zerocheck.judge.update": 0.15,
    "zerocheck.judge.expected": 0.15,
    "zerocheck.judge.obligations.gradient": 0.15,
    "zerocheck.judge.clipping": 0.15,
    "zerocheck.judge.obligations.clip": 0.15,
    "zerocheck.judge.obligations.loss": 0.25,
    "zerocheck.judge.obligations.publish": 0.15,
    "zerocheck.judge.ownership": 0.15,
    "zerocheck.judge.obligations.buffers": 0.25,
    "zerocheck.judge.skip": 0.25,
    "zerocheck.judge.local": 0.1,
    "zerocheck.judge.hidden": 0.15,
    "zerocheck.judge.state": 0.25,
    "zerocheck.judge.case": 0.05,
    "zerocheck.judge.context": 0.05,
    "zerocheck.optimizers.adagrad.bounds": 0.25,
    "zerocheck.optimizers.adamw.bounds": 0.15,
    "zerocheck.optimizers.coupled_decay": 0.25,
    "zerocheck.optimizers.sgd.bounds": 0.25,
    "zerocheck_reference.adamw": 0.25,
    "zerocheck_reference.sgd": 0.25,
    "zerocheck_reference.clip": 0.15,
    "zerocheck_reference.gradient": 0.1,
    "zerocheck_reference.precision": 0.25,
}
"""The modules, and the share of their mutants that is tried. Which ones: by a hash of what they
change, so that a change elsewhere does not choose others."""

DIAGNOSIS = (
    "UpdateJudge._of_count",
    "_attribution",
    "_diagnosed",
    "_earlier_norm",
    "_evidence",
    "_local_coefficient",
)
"""Not mutated: they say what explains a violation, as judge/diagnose does, which faults that ranks
run with see."""

TESTS = ("tests/judge", "tests/optimizers", "tests/reference")
LEFT_OUT = ("tests/judge/test_sensitivity.py",)
"""It judges 200 cases some twenty times each: too slow, and medians see no single mutant."""

KILLED = 0.95
"""Share of the mutants that must be killed."""

PATIENCE = 20.0
"""A mutant is killed too if its tests take longer than this many times what they took, and a
minute: it does not come to an end."""

SURVIVES = "survives"
"""In the column of a report that names the killer."""

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Explained:
    """A survivor of explained.toml."""

    name: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant: the test that killed it, "" if none did."""

    killer: str
    tests: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all chosen mutants; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once (default: 2)")
    parser.add_argument("--every", action="store_true", help="all mutants, not a choice of them")
    parser.add_argument("--only", default="", help="those with this text in their name")
    parser.add_argument("--report", type=Path, help="file for the report (tab-separated)")
    parser.add_argument(
        "--again", type=Path, help="those that survive in this report, and are not explained"
    )
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    # A rank, or a kernel, that shares the two cores is one more at once.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        os.environ["ZEROCHECK_TEST_OBSERVATIONS"] = directory
        run = _Run(asked, Path(directory))
        ignored = [f"--ignore={path}" for path in LEFT_OUT]
        options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", *ignored]
        code = int(pytest.main([*options, *TESTS], plugins=[run]))
    print(f"{time.monotonic() - begun:.0f} s")
    return code or run.code


class _Run:
    """A pytest plugin: instead of running the tests that were collected, tries mutants on them."""

    def __init__(self, asked: argparse.Namespace, directory: Path) -> None:
        self.asked = asked
        self.directory = directory
        self.code = 1

    def pytest_configure(self) -> None:
        hypothesis.settings.register_profile(
            "mutants", database=None, deadline=None, derandomize=True
        )
        hypothesis.settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        # torch imports its inductor when a test leaves deterministic algorithms: 1.5 seconds.
        import torch._inductor  # noqa: F401

        sources = {module: source_of(module).read_text() for module in CHOSEN}
        chosen = [
            one
            for module, source in sources.items()
            for one in mutants(module, source)
            if (self.asked.every or _is_chosen(one)) and self.asked.only in one.name
        ]
        if self.asked.again is not None:
            left = _survivors(self.asked.again)
            known = {one.name for one in explained()}
            chosen = [
                one
                for one in chosen
                if (one.module, one.function, one.before, one.after) in left
                and one.name not in known
            ]
        print(f"\n{len(chosen)} mutants", flush=True)
        covered = self._record(session.items)
        verdicts = dict(self._try(chosen, sources, covered, session.items))
        part = self.asked.only or self.asked.every or self.asked.again
        self.code = _conclude(chosen, verdicts, whole=not part)
        if self.asked.report is not None:
            self.asked.report.write_text(_report(chosen, verdicts))
        return True

    def _record(self, items: Sequence[pytest.Item]) -> Covered:
        """Run all tests once without a mutant."""
        child = Child(self.directory / "unchanged.log", record, items, tuple(CHOSEN))
        covered = child.result()
        if covered is None or covered.failed:
            print(child.output.read_text(errors="replace"))
            raise pytest.exit.Exception("the tests fail without a mutant", returncode=1)
        seconds = sum(covered.seconds.values())
        print(f"{len(items)} tests without a mutant: {seconds:.0f} s", flush=True)
        assert isinstance(covered, Covered)
        return covered

    def _try(
        self,
        chosen: Sequence[Mutant],
        sources: Mapping[str, str],
        covered: Covered,
        items: Sequence[pytest.Item],
    ) -> Iterator[tuple[str, Verdict]]:
        """(name, verdict) of each mutant, as they come in."""
        by_name = {item.nodeid: item for item in items}
        waiting = list(reversed(chosen))
        running: dict[str, tuple[Child, Mutant, float]] = {}
        while waiting or running:
            while waiting and len(running) < self.asked.jobs:
                mutant = waiting.pop()
                tests = _tests(mutant, covered)
                if not tests:
                    yield mutant.name, _told(mutant, Verdict("", 0, 0.0))
                    continue
                tree = mutated(sources[mutant.module], mutant.number)
                output = self.directory / f"{len(waiting)}.log"
                given = [by_name[test] for test in tests], mutant.module, tree
                limit = 60 + PATIENCE * sum(covered.seconds[test] for test in tests)
                running[mutant.name] = Child(output, kill, *given), mutant, limit
            ready = wait([child.receiver for child, _, _ in running.values()], timeout=1.0)
            for name, (child, mutant, limit) in list(running.items()):
                seconds = child.seconds
                if child.receiver in ready:
                    killer, count = child.result() or ("the process died", 0)
                elif seconds > limit:
                    killer, count = f"no end after {limit:.0f} s", 0
                    child.end()
                else:
                    continue
                del running[name]
                child.output.unlink()
                yield name, _told(mutant, Verdict(killer, count, seconds))


def _is_chosen(mutant: Mutant) -> bool:
    if mutant.function in DIAGNOSIS:
        return False
    digest = hashlib.sha256(mutant.name.encode()).digest()
    return int.from_bytes(digest[:8]) < CHOSEN[mutant.module] * 2**64


def _tests(mutant: Mutant, covered: Covered) -> list[str]:
    """The tests that run one of its lines, files with quick ones first, quick ones first."""
    lines = {(mutant.module, line) for line in mutant.lines}
    runs = [test for test, ran in covered.lines.items() if ran & lines]
    if not mutant.function or not runs:
        # A constant, or a default: whatever runs something of the module may see it.
        runs = [
            test
            for test, ran in covered.lines.items()
            if any(module == mutant.module for module, _ in ran)
        ]
    of_file: dict[str, float] = {}
    for test in runs:
        file = test.partition("::")[0]
        of_file[file] = of_file.get(file, 0.0) + covered.seconds[test]
    return sorted(
        runs, key=lambda test: (of_file[test.partition("::")[0]], covered.seconds[test], test)
    )


def _told(mutant: Mutant, verdict: Verdict) -> Verdict:
    fate = f"killed by {verdict.killer}" if verdict.killer else "SURVIVES"
    print(
        f"{mutant.module}:{mutant.line}: {mutant.before} -> {mutant.after}\n"
        f"    {fate} ({verdict.tests} tests, {verdict.seconds:.1f} s)",
        flush=True,
    )
    return verdict


def explained() -> list[Explained]:
    """The survivors that are explained."""
    found = tomllib.loads((HERE / "explained.toml").read_text()).get("survivor", [])
    return [Explained(**one) for one in found]


def _conclude(chosen: Sequence[Mutant], verdicts: Mapping[str, Verdict], *, whole: bool) -> int:
    """Print what came of it; the exit code. whole: all that is chosen was tried, and no more."""
    known = {one.name for one in explained()}
    survivors = [one.name for one in chosen if not verdicts[one.name].killer]
    killed = len(chosen) - len(survivors)
    print(f"\n{killed} of {len(chosen)} killed ({killed / max(len(chosen), 1):.1%})")
    problems = [
        f"survives, and is not explained: {name}" for name in survivors if name not in known
    ]
    if whole:
        problems += [
            f"is explained, and does not survive: {name}"
            for name in sorted(known.difference(survivors))
        ]
        if killed < KILLED * len(chosen):
            problems.append(f"fewer than {KILLED:.0%} are killed")
    print("\n".join(problems) or "every survivor is explained")
    return 1 if problems else 0


def _report(chosen: Sequence[Mutant], verdicts: Mapping[str, Verdict]) -> str:
    rows = [("module", "function", "line", "before", "after", "killed by", "tests", "seconds")]
    for one in chosen:
        verdict = verdicts[one.name]
        rows.append(
            (
                one.module,
                one.function,
                str(one.line),
                one.before,
                one.after,
                verdict.killer or SURVIVES,
                str(verdict.tests),
                f"{verdict.seconds:.1f}",
            )
        )
    return "".join("\t".join(row) + "\n" for row in rows)


def _survivors(report: Path) -> set[tuple[str, ...]]:
    """Return (module, function, before, after) of each mutant that survives in a report."""
    rows = [line.split("\t") for line in report.read_text().splitlines()]
    return {(row[0], row[1], row[3], row[4]) for row in rows if row[5] == SURVIVES}


if __name__ == "__main__":
    sys.exit(main())
