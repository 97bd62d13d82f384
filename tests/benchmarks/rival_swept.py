"""The kept rival over numbers of ranks, steps and model sizes, for the curves.

A rank of MultiProcContinuousTest is told the name of a test and nothing else, so each point of a
curve is a test method of its own: `test_ddp_s5_w13` takes 5 steps on a model 7-13-13-3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.rival_spawn import check_parity, ddp, fsdp2
from torch.testing._internal.common_distributed import MultiProcContinuousTest

SHARDERS = {"ddp": ddp, "fsdp2": fsdp2}
WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
STEPS = (1, 2, 5, 10, 20)
WIDTHS = (4, 13, 64, 256)
USUAL = {"world": 2, "steps": 5, "width": 13}
"""The point at which the three curves cross."""


def _test(name: str, steps: int, width: int) -> Callable[[MultiProcContinuousTest], None]:
    def test(self: MultiProcContinuousTest) -> None:
        check_parity(SHARDERS[name], steps=steps, widths=(width, width))

    return test


def _class(world: int) -> type[MultiProcContinuousTest]:
    points = {(USUAL["steps"], USUAL["width"])}
    if world == USUAL["world"]:
        points |= {(steps, USUAL["width"]) for steps in STEPS}
        points |= {(USUAL["steps"], width) for width in WIDTHS}
    members: dict[str, Any] = {
        "world_size": world,
        "backend_str": classmethod(lambda cls: "gloo"),
        "__module__": __name__,
    }
    for name in SHARDERS:
        for steps, width in sorted(points):
            members[f"test_{name}_s{steps}_w{width}"] = _test(name, steps, width)
    return type(f"TestSwept{world}", (MultiProcContinuousTest,), members)


# The runner finds classes by name in the module, and ranks unpickle them from there.
globals().update({f"TestSwept{world}": _class(world) for world in WORLD_SIZES})
