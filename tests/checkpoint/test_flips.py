"""One flipped bit anywhere: a report or a refusal in words, never a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hand_made_checkpoints import flip, save_dcp, state
from safetensors.torch import save_file

from zerocheck.checkpoint.examine import examine
from zerocheck.errors import UsageError

FLIPS = 40


@pytest.mark.parametrize(
    "name", ["dcp/.metadata", "dcp/__0_0.distcp", "new.pt", "old.pt", "model.safetensors"]
)
def test_a_flipped_bit(tmp_path: Path, name: str) -> None:
    tree = state()
    save_dcp(tree, tmp_path / "dcp")
    torch.save(tree, tmp_path / "new.pt")
    torch.save(tree, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(tree["model"], tmp_path / "model.safetensors")
    path = tmp_path / name
    given = path.parent if name.startswith("dcp") else path
    data = path.read_bytes()
    drawn = random.Random(name)
    noticed = 0
    for _ in range(FLIPS):
        flip(path, drawn.randrange(len(data)), drawn.randrange(8))
        try:
            noticed += bool(examine(given).findings)
        except UsageError:
            noticed += 1
        path.write_bytes(data)
    assert not examine(given).findings
    # The rest of a small archive is padding and names that nobody reads.
    assert noticed >= FLIPS / 3
