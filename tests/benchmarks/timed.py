"""`python -m benchmarks.timed MODULE [ROUNDS]`: wall seconds of each unittest method, as JSON.

MODULE and what it imports are loaded before the clock starts. Each round runs every test once;
a class's own preparation is not in its tests' times. {test: [seconds per round]}.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import unittest


class _Timed(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, list[float]] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started = time.perf_counter()

    def stopTest(self, test: unittest.TestCase) -> None:
        took = time.perf_counter() - self._started
        self.seconds.setdefault(test.id().partition(".Test")[2], []).append(took)
        super().stopTest(test)


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    result = _Timed()
    # The rounds of a class follow each other, so that ranks which are kept stay warm.
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        names = [(type(test), test.id().rpartition(".")[2]) for test in suite]
        again = [kind(name) for _ in range(rounds) for kind, name in names]
        unittest.TestSuite(again).run(result)
    problems = [text for _, text in result.failures + result.errors]
    if problems:
        sys.exit("\n".join(problems))
    print(json.dumps(result.seconds))


if __name__ == "__main__":
    main()
