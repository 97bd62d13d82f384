"""What takes long to import is not imported where nobody needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hand_made import ENVIRONMENT

from zerocheck.case.schema import Case
from zerocheck.run.findings.case_file import write
from zerocheck.run.records.records import CaseFile

JUDGED = """
import sys, torch
from torch.utils.checkpoint import checkpoint
from zerocheck.judge.local import as_on_a_rank
model = torch.nn.Linear(3, 2)
for _ in range(2):
    with as_on_a_rank():
        checkpoint(model, torch.ones(1, 3), use_reentrant=False).sum().backward()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        if "torch._inductor.config" in sys.modules:
            assert torch._inductor.config.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    print("torch._dynamo" in sys.modules)
    import torch._inductor.config
    assert not torch._inductor.config.deterministic
function = checkpoint.__wrapped__
assert getattr(function, "__dynamo_disable") is not function  # but what the compiler made of it
"""


def test_the_judge_does_without_the_compiler_of_torch() -> None:
    """But tells it, if it is there."""
    done = subprocess.run([sys.executable, "-c", JUDGED], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


ENGINE = """
import sys
import zerocheck.run.engine
assert "torch" in sys.modules
print([name for name in sys.argv[1:] if name in sys.modules])
"""


def test_the_judge_does_without_what_ranks_import() -> None:
    """It takes half as long as torch itself, and the first verdict waits for it."""
    names = ("distributed.tensor", "distributed.checkpoint", "distributed.fsdp", "_dynamo")
    command = [sys.executable, "-c", ENGINE, *(f"torch.{name}" for name in names), "sympy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


STARTED = """
import sys
from zerocheck.ranks.pool import Pool
def start(*_, **__):
    print("torch" in sys.modules)
    raise SystemExit(0)
Pool.__init__ = start
from zerocheck.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "command",
    [("run", "ddp"), ("faults", "last-microbatch-only"), ("replay", "case.json")],
    ids=lambda one: one[0],
)
def test_ranks_import_torch_while_the_command_does(tmp_path: Path, command: list[str]) -> None:
    """Both take seconds, and the first verdict waits for both."""
    file = CaseFile(
        implementation="ddp",
        case=Case(),
        status="violated",
        judgement=None,
        environment=ENVIRONMENT,
    )
    write(tmp_path, "case", file)
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *command], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "False\n", done.stderr
