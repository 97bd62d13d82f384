"""The rival with ranks that are kept: torch.testing's newer MultiProcContinuousTest.

The same tests as in rival_spawn.py, but the ranks of a class start once, before its first test.
`python -m pytest tests/benchmarks/rival_kept.py` runs it alone.
"""

from __future__ import annotations

from benchmarks.rival_spawn import check_parity, ddp, fsdp2
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import run_tests


class _TestParity(MultiProcContinuousTest):
    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def test_ddp(self) -> None:
        check_parity(ddp)

    def test_fsdp2(self) -> None:
        check_parity(fsdp2)


class TestParity2(_TestParity):
    world_size = 2


class TestParity4(_TestParity):
    world_size = 4


del _TestParity  # a base, not a test

if __name__ == "__main__":
    run_tests()
