"""Tests with large packages, collected where ZEROCHECK_FIELD=1 is set and the package is there."""

from __future__ import annotations

import os
from importlib.util import find_spec

NEEDS = {
    "test_attach_trainers.py": ("transformers", "accelerate", "lightning"),
    "test_configs.py": ("transformers", "accelerate"),
    "test_lightning.py": ("lightning",),
    "test_model_configs.py": ("transformers",),
    "test_stacks.py": ("transformers", "accelerate", "lightning"),
    "test_titan_trainer.py": ("torchtitan", "torchdata", "datasets", "tensorboard"),
    "test_torchtitan.py": ("torchtitan", "triton"),
}
"""The packages that the tests of a file need."""

collect_ignore = [
    file
    for file, packages in NEEDS.items()
    if os.environ.get("ZEROCHECK_FIELD") != "1" or not all(map(find_spec, packages))
]
