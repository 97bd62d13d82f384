"""How a checked step reads: what is estimated, or not judged, is said."""

from __future__ import annotations

from msgspec.structs import replace

from zerocheck.attached.text import holds_line, violated_text
from zerocheck.protocol.verdicts import Judgement, Obligation, Violation


def violation(obligation: Obligation) -> Violation:
    return Violation(
        obligation=obligation,
        step=3,
        role="gradient",
        tensors=("w",),
        ranks=(0,),
        explanation=f"{obligation} is off",
    )


def test_the_line_of_a_step_that_holds() -> None:
    full = Judgement(
        statuses={"gradient": "holds", "update": "holds"},
        share={"gradient": 0.25},
        estimated=("gradient",),
    )
    assert holds_line(3, full, 1.0) == (
        "zerocheck: step 3: gradient (estimated), update hold, at most 25% of a bound used "
        "(full; checked in 1.00 s)"
    )
    reason = "the optimizer took no step"
    other = Judgement(
        statuses={"update": "holds"}, tier="state only", unjudged={"gradient": reason}
    )
    assert holds_line(3, other, 1.0).endswith(f"1.00 s); gradient not judged: {reason}")


def test_a_finding_says_whether_its_bound_is_estimated() -> None:
    """One of values that are compared bit by bit has none."""
    rows = (("gradient", 1.0, True), ("gradient", None, False), ("update", 1.0, False))
    for obligation, bound, estimated in rows:
        judgement = Judgement(
            statuses={obligation: "violated"},
            violations=(replace(violation(obligation), bound=bound),),
            estimated=("gradient",),
        )
        text = violated_text("ddp", judgement, "bundle")
        assert (
            "estimated, since kernels or the order of operations differ" in text
        ) is estimated, text
