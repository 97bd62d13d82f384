"""Calls of a model become data and back."""

from __future__ import annotations

import msgspec
import torch

from zerocheck.attached.record.calls import StoredForward, restored, stored
from zerocheck.attached.record.forwards import Forward


def forward(**kwargs: object) -> Forward:
    return Forward(
        args=(torch.arange(3), [1, (2.5, None)]),
        kwargs={
            "mask": {"a": torch.ones(2, 2, dtype=torch.bool)},
            "bias": torch.zeros(2, requires_grad=True),
            **kwargs,
        },
        random=(torch.get_rng_state(),),
        autocast=("cpu", torch.bfloat16),
        training=False,
        other_mode=("head.",),
        inner_autocast={"": ("cpu", torch.float16), "wrapped.": None},
        returned={".b[1]": torch.full((2,), 0.5)},
    )


def test_there_and_back() -> None:
    calls, tensors = stored([forward(name="x"), forward(flag=True)])
    assert calls is not None and len(tensors) == 2 * 5
    again = msgspec.json.decode(msgspec.json.encode(calls), type=tuple[StoredForward, ...])
    first, second = restored(again, tensors)
    assert torch.equal(first.args[0], torch.arange(3)) and first.args[1] == [1, (2.5, None)]
    assert first.kwargs["mask"]["a"].all() and first.kwargs["name"] == "x"
    assert second.kwargs["flag"] is True and second.autocast == ("cpu", torch.bfloat16)
    assert not second.training and second.other_mode == ("head.",)
    assert second.inner_autocast == {"": ("cpu", torch.float16), "wrapped.": None}
    assert [*second.returned] == [".b[1]"] and second.returned[".b[1]"].tolist() == [0.5, 0.5]
    assert first.args[0].requires_grad is False and first.kwargs["bias"].requires_grad


def test_what_is_not_plain_is_not_stored() -> None:
    assert stored([forward(), forward(config=object())]) == (None, {})
