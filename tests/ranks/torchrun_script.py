"""Started by torchrun in test_ranks_torchrun.py."""

from __future__ import annotations

import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(os.path.dirname(HERE)), HERE]

from zerocheck.errors import UsageError  # noqa: E402
from zerocheck.ranks import Slot, torchrun  # noqa: E402
from zerocheck.ranks.torchrun import TorchrunPool  # noqa: E402


def main(elsewhere: bool) -> None:
    if elsewhere and os.environ["RANK"] != "0":
        # As if on another node: what is put must come through the store.
        torchrun.machine = lambda: "here"
        import zerocheck.ranks.torchrun_rank as rank_side

        rank_side.machine = lambda: "elsewhere"
    found: dict[str, object] = {}
    with TorchrunPool("ranks_targets:run", timeout_s=2.0) as pool:
        if pool.rank != 0:
            pool.serve()
            return
        try:
            pool.submit(5, b"")
        except UsageError as error:
            found["refused"] = str(error)
        for what in ("reduce", "raise_one", "reduce", "raise_all", "reduce", "put 2000000"):
            result = pool.wait(pool.submit(2, what.encode()))
            found.setdefault("outcomes", []).append(result.outcome)
            if what == "raise_one":
                found["first"] = result.first_failed
                found["summary"] = result.summary()
            if what.startswith("put"):
                slot = Slot(*json.loads(result.payloads[1]))
                found["sum"] = float(result.arenas[1].tensor(slot).double().sum())
                result.release()
        for what in ("skip_one", "slow_once 3", "reduce"):
            result = pool.wait(pool.submit(2, what.encode()))
            found.setdefault("late", []).append([result.outcome, result.reason])
    print(json.dumps(found))


main("elsewhere" in sys.argv)
