"""Samples put together from parts of their sequence, as one device would be given them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from summaries import summary
from torch import nn

from zerocheck.attached.record.axes import Axes, JobAxis, SequenceAxis
from zerocheck.attached.record.forwards import SAMPLED, Forward, samples_of
from zerocheck.attached.record.ranks import Alone
from zerocheck.attached.record.step_record import Observed
from zerocheck.attached.verdict.whole_samples import with_whole_samples
from zerocheck.errors import UsageError


def call(given: dict[str, torch.Tensor], gradient: torch.Tensor, *, draws: bool = False) -> Forward:
    return Forward((), given, (), None, True, returned={"": gradient}, draws=draws)


@dataclass
class Two(Alone):
    """The first rank collects what the second has sent."""

    sent: list[bytes] = field(default_factory=list)

    def to_first(self, data: bytes, members: Any) -> list[bytes]:
        self.sent.append(data)
        return self.sent[::-1] if len(self.sent) == len(members) else []


def whole(
    first: list[Forward], second: list[Forward], axis: SequenceAxis | None = None
) -> Observed:
    """What the first rank has then; the second has nothing."""
    ranks = Two()
    over = Axes((JobAxis("cp", "sequence", (0, 1), 0, axis or SequenceAxis()),))
    other = with_whole_samples(Observed(summary(rank=1), forwards=second), over, ranks)
    assert other.forwards == [] and other.summary.samples_on == 0
    return with_whole_samples(Observed(summary(), forwards=first), over, ranks)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize(("here", "there"), [(4, 4), (5, 3)])
def test_inputs_and_gradients_are_put_together(here: int, there: int) -> None:
    """Positions lie along their first dimension, and parts may be uneven."""
    words, places = numbers(2, here + there), numbers(here + there)
    gradient = numbers(2, here + there, 3).float()
    cuts = [slice(0, here), slice(here, None)]
    parts = [
        [call({"words": words[:, cut], "places": places[cut]}, gradient[:, cut])] for cut in cuts
    ]
    (made,) = whole(*parts).forwards
    assert torch.equal(made.kwargs["words"], words) and torch.equal(made.kwargs["places"], places)
    assert torch.equal(made.returned[""], gradient)


def test_a_zigzag_order() -> None:
    words, gradient = numbers(1, 8), numbers(1, 8, 1).float()
    order = [[0, 1, 6, 7], [2, 3, 4, 5]]
    parts = [[call({"words": words[:, at]}, gradient[:, at])] for at in order]
    for axis in (SequenceAxis(order="zigzag"), SequenceAxis(order=[*order[0], *order[1]])):
        (made,) = whole(*parts, axis).forwards
        assert torch.equal(made.kwargs["words"], words)
        assert torch.equal(made.returned[""], gradient)
    assert not torch.equal(whole(*parts).forwards[0].kwargs["words"], words)


def test_the_other_order_can_be_asked_for() -> None:
    words, gradient = numbers(1, 8), numbers(1, 8, 1).float()
    order = [[0, 1, 6, 7], [2, 3, 4, 5]]
    seen = whole(*([call({"words": words[:, at]}, gradient[:, at])] for at in order))
    assert seen.reordered is not None
    assert torch.equal(seen.reordered()[0].kwargs["words"], words)


def test_a_model_that_cuts_whole_sequences_itself() -> None:
    """Inputs are as they were; gradients of parts are put together, those of wholes are added."""
    words = numbers(1, 8)
    parts, wholes = numbers(1, 8, 1).float(), torch.ones(1, 8, 1)
    (made,) = whole(
        [call({"words": words}, parts[:, :4])], [call({"words": words}, parts[:, 4:])]
    ).forwards
    assert torch.equal(made.kwargs["words"], words) and torch.equal(made.returned[""], parts)
    (made,) = whole([call({"words": words}, wholes)], [call({"words": words}, 2 * wholes)]).forwards
    assert torch.equal(made.returned[""], 3 * wholes)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"words": numbers(1, 4)}, {"words": numbers(1, 4) + 4, "draws": True}, "random numbers"),
        ({"words": numbers(4)}, {"words": numbers(4) + 4}, "has a dimension 1 for the sequence"),
        (
            {"words": numbers(1, 4), "mask": numbers(3)},
            {"words": numbers(1, 4) + 4, "mask": numbers(3) + 1},
            "differs between parts of a sequence, and has no dimension of 4 positions",
        ),
        (
            {"words": numbers(1, 4), "gradient": torch.tensor(1.0)},
            {"words": numbers(1, 4) + 4, "gradient": torch.tensor(1.0)},
            "so the loss of a whole sequence is not known",
        ),
        (
            {"words": numbers(1, 4), "mask": numbers(1, 4)},
            {"words": numbers(1, 4) + 4},
            "not all parts of a sequence have the input",
        ),
    ],
)
def test_what_cannot_be_put_together_is_named(
    first: dict[str, Any], second: dict[str, Any], reason: str
) -> None:
    calls = []
    for given in (first, second):
        more = dict(given)
        gradient = more.pop("gradient", torch.ones(1, 4, 2))
        calls.append([call(more, gradient, draws=more.pop("draws", False))])
    seen = whole(*calls)
    assert reason in seen.summary.unjudged and seen.forwards == []


def test_ranks_that_call_the_model_another_number_of_times() -> None:
    one = call({"words": numbers(1, 4)}, torch.ones(1, 4, 2))
    assert "called the model 2 and 1 times" in whole([one, one], [one]).summary.unjudged


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (SequenceAxis(order="zigzag"), "a part of a zigzag sequence has 3 positions"),
        (SequenceAxis(order=[0, 1, 2]), "has 3 positions (allowed: each of the 6"),
    ],
)
def test_wrong_orders_are_refused(axis: SequenceAxis, words: str) -> None:
    parts = [[call({"words": numbers(1, 3) + 3 * r}, torch.ones(1, 3, 2))] for r in (0, 1)]
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        whole(*parts, axis)


def test_samples_of_outputs_are_copies_of_plain_tensors() -> None:
    """To read others may fail, or communicate; a view would keep the output, and change with it."""
    plain = torch.arange(200.0, dtype=torch.float64)
    outputs = {"plain": plain, "sparse": torch.eye(3).to_sparse(), "other": nn.Parameter(plain)}
    found = samples_of(outputs)
    assert [*found] == ["plain"] and len(found["plain"]) == SAMPLED
    plain.zero_()
    assert found["plain"][1] == 3.0


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'zigzag'"):
        SequenceAxis(order="zigzg")  # type: ignore[arg-type]
