"""What `restore` is told when it asks for something that the state does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zerocheck.drive.checkpoints import MissingStateError, RestoreState


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 2)
        self.head.weight = self.stem.weight
        self.head.bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (("head.weight", "parameter"), "tied to 'stem.weight'"),
        (("_fsdp.stem.weight", "parameter"), "did you mean 'stem.weight'"),
        (("head.bias", "exp_avg"), "frozen"),
        (("stem.weight", "exp_avg_square"), "did you mean 'exp_avg_sq'"),
        ("stem.weight", "(name, role)"),
    ],
)
def test_what_is_missing_is_explained(key: Any, words: str) -> None:
    state = {
        ("stem.weight", "parameter"): torch.ones(2, 2),
        ("stem.weight", "exp_avg"): torch.ones(2, 2),
        ("stem.weight", "exp_avg_sq"): torch.ones(2, 2),
        ("head.bias", "parameter"): torch.ones(2),
    }
    given = RestoreState(state, _Tied())
    assert dict(given) == state and given.get(key) is None and key not in given
    with pytest.raises(MissingStateError) as raised:
        given[key]
    assert words in str(raised.value)
    assert isinstance(raised.value, KeyError)
