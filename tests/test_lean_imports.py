"""What takes long to import is not imported where nobody needs it."""

from __future__ import annotations

import subprocess
import sys

JUDGED = """
import sys, torch
from zerocheck.judge.local import as_on_a_rank
for _ in range(2):
    with as_on_a_rank():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        if "torch._inductor.config" in sys.modules:
            assert torch._inductor.config.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    print("torch._dynamo" in sys.modules)
    import torch._inductor.config
    assert not torch._inductor.config.deterministic
"""


def test_the_judge_does_without_the_compiler_of_torch() -> None:
    """But tells it, if it is there."""
    done = subprocess.run([sys.executable, "-c", JUDGED], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
